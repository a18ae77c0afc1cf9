"""A job in one process, guarded destinations, and comparison by bytes."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import anyio
import torch
from torch import Tensor

import weightsync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

Mode = Literal["staged", "swap", "inplace"]
MODES: tuple[Mode, ...] = ("staged", "swap", "inplace")

GUARD = 64
FILL = 0xA5
SECONDS = 20.0


def raw(tensor: Tensor) -> list[int]:
    """The bytes of a tensor's elements in row-major order."""
    with torch.inference_mode():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).tolist()


def bits(values: list[int], dtype: torch.dtype, carrier: torch.dtype) -> Tensor:
    """A tensor made of bit patterns."""
    return torch.tensor(values, dtype=carrier).view(dtype)


class Guarded:
    """A destination full of a sentinel, between guard bytes."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._all = torch.full((nbytes + 2 * GUARD,), FILL, dtype=torch.uint8)
        self._inside = slice(GUARD, GUARD + nbytes)
        self.tensor = self._all[self._inside].view(dtype).view(shape)

    @property
    def intact(self) -> bool:
        """Whether nothing was written beside it."""
        around = self._all.clone()
        around[self._inside] = FILL
        return bool((around == FILL).all())

    @property
    def untouched(self) -> bool:
        """Whether nothing was written into it either."""
        return bool((self._all == FILL).all())


class Source:
    """What a state dict held, to find out later whether a push changed it."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._state_dict = state_dict
        self._before = self._look()

    @property
    def untouched(self) -> bool:
        """Whether bytes, gradients and flags are what they were."""
        return self._before == self._look()

    def _look(self) -> dict[str, object]:
        return {
            name: (raw(tensor), tensor.requires_grad, tensor.grad, tensor.data_ptr())
            for name, tensor in self._state_dict.items()
        }


class Job:
    """All trainer ranks, and the replicas that have joined them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.trainers: list[weightsync.Trainer] = []
        self._stack = stack
        self._replicas = 0

    @property
    def address(self) -> str:
        """Where its store is."""
        return self.trainers[0].address

    async def enter(self, transport: Any) -> Any:
        """Open a transport and close it with the job."""
        return await self._stack.enter_async_context(transport)

    async def join(
        self,
        *ranks: Mapping[str, object],
        mode: Mode = "staged",
        replica: str | None = None,
        **options: Any,
    ) -> list[weightsync.Generator]:
        """Let a replica join, one state dict for each rank, and wait until it has."""
        name = replica or f"gen-{self._replicas}"
        self._replicas += 1
        generators = [
            await self.enter(
                weightsync.Generator(
                    self.address,
                    state_dict,
                    replica=name,
                    rank=rank,
                    world_size=len(ranks),
                    mode=mode,
                    timeout=SECONDS,
                    **options,
                )
            )
            for rank, state_dict in enumerate(ranks)
        ]
        for trainer in self.trainers:
            await trainer.wait_for_replicas(self._replicas, timeout=SECONDS)
        return generators

    async def join_one(
        self, state_dict: Mapping[str, object], **options: Any
    ) -> weightsync.Generator:
        """Let a replica of one rank join."""
        (generator,) = await self.join(state_dict, **options)
        return generator

    async def push(
        self, *state_dicts: Any, **options: Any
    ) -> list[weightsync.PushReport]:
        """Push on every trainer rank, each its own state dict or all the same one."""
        outcomes = await self.outcomes(*state_dicts, **options)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def outcomes(self, *state_dicts: Any, **options: Any) -> list[Any]:
        """As ``push``, but errors are returned, one for each rank."""
        given = state_dicts * (len(self.trainers) if len(state_dicts) == 1 else 1)
        options.setdefault("timeout", SECONDS)
        return await together(
            *[
                lambda trainer=trainer, state_dict=state_dict: trainer.push(
                    state_dict, **options
                )
                for trainer, state_dict in zip(self.trainers, given, strict=True)
            ]
        )

    async def deliver(
        self,
        generators: weightsync.Generator | list[weightsync.Generator],
        *state_dicts: Any,
        **options: Any,
    ) -> list[weightsync.Update]:
        """Push and receive at the same time, as mode "inplace" needs it."""
        ranks = generators if isinstance(generators, list) else [generators]
        pushed, received = await together(
            lambda: self.push(*state_dicts, **options), lambda: receive_all(ranks)
        )
        for outcome in [pushed, *received]:
            if isinstance(outcome, BaseException):
                raise outcome
        return received


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Await calls at the same time; return what each returned or raised."""
    outcomes: list[Any] = [None] * len(calls)

    async def run(index: int) -> None:
        try:
            outcomes[index] = await calls[index]()
        except weightsync.WeightSyncError as error:
            outcomes[index] = error

    async with anyio.create_task_group() as group:
        for index in range(len(calls)):
            group.start_soon(run, index)
    return outcomes


async def receive_all(
    generators: list[weightsync.Generator], **options: Any
) -> list[Any]:
    """Receive on all ranks of a replica at the same time."""
    options.setdefault("timeout", SECONDS)
    return await together(
        *[lambda rank=rank: rank.receive(**options) for rank in generators]
    )


async def until_pending(generator: weightsync.Generator, version: int) -> None:
    """Wait until a version is whole on a rank: soon after the push has returned."""
    with anyio.fail_after(SECONDS):
        while generator.pending != version:
            await anyio.sleep(0.001)


def on(device: str, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and shards copied to the GPU of this number; as they are on CPUs.

    Trainer ranks have the first ones, in the order of their numbers.
    """
    place = torch.device(device, number) if device == "cuda" else torch.device(device)

    def moved(value: Any) -> Any:
        if isinstance(value, weightsync.Shard):
            return replace(value, tensor=value.tensor.to(place))
        return value.to(place)

    return {name: moved(value) for name, value in state.items()}


@asynccontextmanager
async def open_job(
    trainers: int = 1, device: str = "cpu", **options: Any
) -> AsyncIterator[Job]:
    """Open trainer ranks in this process, each on a GPU of its own if on GPUs."""
    async with AsyncExitStack() as stack:
        job = Job(stack)
        address = "tcp://127.0.0.1:0"
        for rank in range(trainers):
            if device == "cuda":
                torch.cuda.set_device(rank)
            trainer = weightsync.Trainer(
                address, rank=rank, world_size=trainers, timeout=SECONDS, **options
            )
            job.trainers.append(await job.enter(trainer))
            address = job.address
        yield job
