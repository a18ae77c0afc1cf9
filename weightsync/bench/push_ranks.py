"""The processes of the case ``push``: trainer ranks and generators, as users write.

Each follows the director in ``push.py``; what is timed is nothing but the call of
``push`` and the return of ``receive``. The clock is CLOCK_MONOTONIC, common to all
processes of a host.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import anyio

import weightsync
from weightsync.bench.besides import Computation, counted_kernels
from weightsync.bench.heartbeat import Heartbeat
from weightsync.bench.memory import Resident, resident_tensor
from weightsync.bench.places import are_emulated, place
from weightsync.bench.push_model import DTYPE, MASTER, Cut, Held, Model, TorchCopy
from weightsync.epoch import Mode
from weightsync.layout import register
from weightsync.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

    from weightsync.announcing import EngineName
    from weightsync.bench.besides import Kernels
    from weightsync.bench.places import Place
    from weightsync.bench.runner import Line

ModeName = Literal["staged", "swap", "inplace"]

TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes of one measurement agree on.

    Trainer ranks cut the rows of each tensor if ``cut`` says so, otherwise each has all
    of them; a replica has ``cut.columns`` ranks. With ``cast`` trainers have float32.
    ``counted`` is the version whose kernels are counted, 0 for none. Trainers compute
    beside pushes that take ``computing`` seconds alone; 0 for not.
    """

    model: Model
    mode: ModeName
    cut: Cut
    cast: bool
    replay: bool
    trainers: int
    replicas: int
    versions: int
    engine: EngineName = "shm"
    counted: int = 0
    computing: float = 0.0

    @property
    def source(self) -> torch.dtype:
        """What trainers have."""
        return MASTER if self.cast else DTYPE

    def pushed(self, rank: int, here: Place) -> Held:
        """What a trainer rank has."""
        row = None if self.cut.rows == 1 else rank
        return Held(self.model, self.cut, self.source, row=row, device=here.bound)

    def received(self, rank: int, here: Place) -> Held:
        """What a generator rank has."""
        column = None if self.cut.columns == 1 else rank
        return Held(self.model, self.cut, DTYPE, column=column, device=here.bound)

    def counting(self, version: int) -> AbstractContextManager[Kernels | None]:
        """Count the kernels of the version that was chosen for that, on GPUs."""
        counted = self.engine == "nccl" and version == self.counted
        return counted_kernels() if counted and not are_emulated() else nullcontext()

    @property
    def source_nbytes(self) -> int:
        """Bytes of the whole model as trainers have it."""
        return self.model.nbytes * self.source.itemsize // DTYPE.itemsize

    @property
    def windows(self) -> int:
        """Bytes of the generators' windows that a trainer rank puts into, about."""
        slots = Mode(self.mode).slots
        return self.model.nbytes * slots * self.replicas // self.trainers


class Copies(NamedTuple):
    """Seconds of one memcpy of what a replica receives, and of torch's own copies."""

    memcpy: float = 0.0
    torch: float | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push, as a trainer rank saw it. ``copies`` are 0 but on rank 0."""

    called: float
    returned: float
    copies: Copies


@dataclass(frozen=True, slots=True)
class Received:
    """One version, as a generator saw it."""

    visible: float
    switched: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What a process says at its end: pauses of its loop, and its memory."""

    gap: float
    collector: float
    rise: int
    verified: int = 0
    kernels: int | None = None
    emulated: bool = False


class Yardsticks:
    """What rank 0 measures beside a push, in memory of its own."""

    def __init__(self, job: Job, here: Place) -> None:
        self._nbytes: Final = job.model.nbytes
        self._source: Final = resident_tensor(job.source_nbytes).to(here.device)
        self._memcpy: Final = here.copying(self._nbytes)
        memory = self._source, self._memcpy.target
        self._torch: Final = (
            TorchCopy(job.model, job.cut, job.source, *memory)
            if here.bound is None
            else None
        )

    def measure(self) -> Copies:
        """Copy once with each."""
        memcpy = self._memcpy.seconds(self._source[: self._nbytes], self._nbytes)
        return Copies(memcpy, None if self._torch is None else self._torch.seconds())

    def close(self) -> None:
        """Let the memory go."""
        self._memcpy.close()


async def train(line: Line, job: Job, rank: int, address: str) -> Kept:
    """Be a trainer rank: for each version fill, wait for the word, push."""
    here = place(job.engine, rank)
    held = job.pushed(rank, here)
    yardsticks = Yardsticks(job, here) if rank == 0 else None
    compute = Computation(job.computing) if job.computing else None
    kernels: list[Kernels | None] = []
    resident, beat = Resident(), Heartbeat()
    async with (
        weightsync.Trainer(
            address,
            rank=rank,
            world_size=job.trainers,
            timeout=TIMEOUT_SECONDS,
            replay=job.replay,
        ) as transport,
        anyio.create_task_group() as group,
    ):
        line.tell(transport.address)
        await transport.wait_for_replicas(job.replicas)
        group.start_soon(beat.run)
        line.tell("ready")
        for version in range(1, job.versions + 1):
            await line.hear()
            held.fill(version)
            copies = Copies() if yardsticks is None else yardsticks.measure()
            line.tell("filled")
            await line.hear()
            with beat.watching(), job.counting(version) as counted:
                kernels.append(counted)
                if compute is not None:
                    compute.start()
                called = time.monotonic()
                await transport.push(
                    held.entries, version=version, require="all", cast=job.cast
                )
                returned = time.monotonic()
            line.tell(Pushed(called, returned, copies))
        await line.hear()
        group.cancel_scope.cancel()
    if yardsticks is not None:
        yardsticks.close()
    rise = resident.rise() - job.windows
    return Kept(beat.longest, beat.collector, rise, **_gpu(here, kernels))


def _gpu(here: Place, kernels: Sequence[Kernels | None]) -> dict[str, Any]:
    """What a process says at its end of its GPU, if it has one."""
    if here.bound is None:
        return {}
    counted = [each.count for each in kernels if each is not None]
    return {"kernels": counted[0] if counted else None, "emulated": are_emulated()}


async def generate(line: Line, job: Job, number: int, rank: int, address: str) -> Kept:
    """Be a rank of a replica: receive each version, then verify every byte."""
    here = place(job.engine, job.trainers + number * job.cut.columns + rank)
    held = job.received(rank, here)
    kernels: list[Kernels | None] = []
    window = Slots.of(Mode(job.mode), register(held.entries).manifest).nbytes
    resident, beat = Resident(), Heartbeat()
    name, verified = f"replica-{number}", 0
    async with (
        weightsync.Generator(
            address,
            held.entries,
            replica=name,
            rank=rank,
            world_size=job.cut.columns,
            mode=job.mode,
            timeout=TIMEOUT_SECONDS,
        ) as transport,
        anyio.create_task_group() as group,
    ):
        group.start_soon(beat.run)
        for version in range(1, job.versions + 1):
            await line.hear()
            line.tell("ready")
            with beat.watching(), job.counting(version) as counted:
                kernels.append(counted)
                update = await transport.receive()
                visible = time.monotonic()
            async with transport.use() as weights:
                verified += held.verify(weights.tensors, version, job.source)
            line.tell(Received(visible, update.switched))
        await line.hear()
        group.cancel_scope.cancel()
    rise = resident.rise() - window
    return Kept(beat.longest, beat.collector, rise, verified, **_gpu(here, kernels))
