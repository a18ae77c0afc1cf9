"""Trainer ranks in processes with a gloo group and meshes; replicas in the test."""

from __future__ import annotations

import warnings
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import weightsync
import weightsync.blocking
from tests.processes.rig import SECONDS, raw, receive_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from tests.processes.harness import Child, Control, Processes


def device_type() -> str:
    """Return where tensors are made: on the CPU or on a GPU."""
    return torch.empty(0).device.type


class Member:
    """A process of a gloo group."""

    def __init__(self, control: Control, rank: int, world: int) -> None:
        self.control = control
        self.rank = rank
        self.world = world

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return a mesh of this shape over all ranks, of where tensors are made."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type(), shape, mesh_dim_names=names)


class Rank(Member):
    """A trainer rank, inside its process."""

    def __init__(self, member: Member, transport: weightsync.blocking.Trainer) -> None:
        super().__init__(member.control, member.rank, member.world)
        self.transport = transport

    def push(
        self, state_dict: Mapping[str, Any], *, replicas: int = 1, **options: Any
    ) -> weightsync.PushReport:
        """Push once so many replicas have joined; also checks the source."""
        self.transport.wait_for_replicas(replicas)
        before = _bytes(state_dict)
        report = self.transport.push(state_dict, **options)
        assert before == _bytes(state_dict)
        return report

    def refusal(self, state_dict: Mapping[str, object], **options: Any) -> str:
        """Push what may not be accepted; return the error, with its class."""
        self.transport.wait_for_replicas(1)
        try:
            self.transport.push(state_dict, **options)
        except weightsync.WeightSyncError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def _bytes(state_dict: Mapping[str, Any]) -> dict[str, object]:
    """What this rank holds, and what is easily lost."""
    return {
        name: (raw(local_of(entry)), getattr(entry, "requires_grad", None))
        for name, entry in state_dict.items()
    }


def local_of(entry: Any) -> Tensor:
    """What this rank holds of a DTensor, a Shard, or a plain tensor."""
    if isinstance(entry, weightsync.Shard):
        return entry.tensor
    local: Tensor = entry.to_local() if hasattr(entry, "to_local") else entry
    return local.detach()


def sharded(full: Tensor, mesh: DeviceMesh, *dims: int | None) -> DTensor:
    """Cut a tensor along a dim for each dim of the mesh; None replicates."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(full, mesh, placements)


def fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard a module by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh, **options)
    return model


def _member(
    control: Control,
    port: int,
    place: tuple[int, int],
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> Any:
    rank, world = place
    seconds = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=seconds
    )
    try:
        return function(Member(control, rank, world), *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _trainer(
    member: Member, address: str, function: Callable[..., Any], *args: object
) -> Any:
    with weightsync.blocking.Trainer(address, timeout=SECONDS) as transport:
        return function(Rank(member, transport), *args)


class World:
    """Processes of one gloo group that run ``function(member, *args)``."""

    def __init__(
        self,
        processes: Processes,
        size: int,
        function: Callable[..., Any],
        *args: object,
        name: str = "member",
    ) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, size, is_master=True, wait_for_workers=False
        )
        self.ranks: list[Child] = [
            processes.start(
                _member,
                *(self._store.port, (rank, size), function, args),
                name=f"{name}-{rank}",
            )
            for rank in range(size)
        ]

    def results(self, timeout: float = SECONDS) -> list[Any]:
        """What the function returned on each rank; raises what it raised."""
        return [rank.result(timeout) for rank in self.ranks]

    def say(self, what: object) -> None:
        """Tell all ranks something."""
        for rank in self.ranks:
            rank.say(what)

    def hear(self, timeout: float = SECONDS) -> list[Any]:
        """Hear something from each rank."""
        return [rank.hear(timeout) for rank in self.ranks]


class Team(World):
    """All trainer ranks of a job; they run ``function(rank, *args)``."""

    def __init__(
        self,
        processes: Processes,
        address: str,
        size: int,
        function: Callable[..., Any],
        *args: object,
    ) -> None:
        super().__init__(
            *(processes, size, _trainer, address, function, *args), name="trainer"
        )
        self.address = address


class Replicas:
    """Replicas of a job, opened, each a list of ranks."""

    def __init__(self, replicas: list[list[weightsync.Generator]]) -> None:
        self.replicas = replicas

    def __iter__(self) -> Iterator[weightsync.Generator]:
        """Iterate over all ranks of all replicas."""
        return (rank for replica in self.replicas for rank in replica)

    async def receive(self, **options: Any) -> list[weightsync.Update]:
        """Receive one version on every rank; raises what the first rank raises."""
        outcomes = await receive_all(list(self), **options)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes


@asynccontextmanager
async def joined(
    team: Team, *layouts: Sequence[Mapping[str, object]], **options: Any
) -> AsyncIterator[Replicas]:
    """Open replicas, each given as one state dict for each of its ranks.

    What a trainer rank raised explains what goes wrong here, so it is raised first.
    """
    try:
        async with AsyncExitStack() as stack:
            replicas = [
                [
                    await stack.enter_async_context(
                        generator(team.address, layout, number, rank, **options)
                    )
                    for rank in range(len(layout))
                ]
                for number, layout in enumerate(layouts)
            ]
            yield Replicas(replicas)
    except weightsync.WeightSyncError:
        team.results(5)
        raise


def generator(
    address: str,
    layout: Sequence[Mapping[str, object]],
    number: int,
    rank: int,
    **options: Any,
) -> weightsync.Generator:
    """Make one rank of the replica ``gen-<number>`` of this layout."""
    return weightsync.Generator(
        address,
        layout[rank],
        replica=f"gen-{number}",
        rank=rank,
        world_size=len(layout),
        timeout=SECONDS,
        **options,
    )


async def delivered(
    team: Team, *layouts: Sequence[Mapping[str, object]], **options: Any
) -> list[weightsync.Update]:
    """Let replicas join, receive one version on every rank, and close."""
    async with joined(team, *layouts, **options) as replicas:
        return await replicas.receive()


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A destination that holds a sentinel."""
    return torch.full(shape, -777, dtype=dtype)


def counted(*shape: int) -> Tensor:
    """A tensor of this shape with the numbers from 0 on."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def as_lists(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values by name, in the order of the names."""
    return {name: tensors[name].tolist() for name in sorted(tensors)}


def halves(full: Tensor, dim: int = 0, parts: int = 2) -> list[weightsync.Shard]:
    """Sentinel destinations that cut a tensor of this shape as ``torch.chunk`` does."""
    shards: list[weightsync.Shard] = []
    start = 0
    for chunk in full.chunk(parts, dim):
        offsets = [start if axis == dim else 0 for axis in range(full.dim())]
        local = filled(*chunk.shape, dtype=full.dtype)
        shards.append(weightsync.Shard(local, global_shape=full.shape, offsets=offsets))
        start += chunk.shape[dim]
    return shards
