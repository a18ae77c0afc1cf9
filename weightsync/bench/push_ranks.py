"""The processes of the case ``push``: trainer ranks and generators, as users write.

Each follows the director in ``push.py``; what is timed is nothing but the call of
``push`` and the return of ``receive``. The clock is CLOCK_MONOTONIC, common to all
processes of a host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import anyio

import weightsync
from weightsync.bench.heartbeat import Heartbeat
from weightsync.bench.memory import Memcpy, Resident, resident_tensor
from weightsync.bench.push_model import DTYPE, MASTER, Cut, Held, Model, TorchCopy
from weightsync.epoch import Mode
from weightsync.layout import register
from weightsync.slots import Slots

if TYPE_CHECKING:
    import torch

    from weightsync.bench.runner import Line

ModeName = Literal["staged", "swap", "inplace"]

TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes of one measurement agree on.

    Trainer ranks cut the rows of each tensor if ``cut`` says so, otherwise each has all
    of them; a replica has ``cut.columns`` ranks. With ``cast`` trainers have float32.
    """

    model: Model
    mode: ModeName
    cut: Cut
    cast: bool
    replay: bool
    trainers: int
    replicas: int
    versions: int

    @property
    def source(self) -> torch.dtype:
        """What trainers have."""
        return MASTER if self.cast else DTYPE

    def pushed(self, rank: int) -> Held:
        """What a trainer rank has."""
        row = None if self.cut.rows == 1 else rank
        return Held(self.model, self.cut, self.source, row=row)

    def received(self, rank: int) -> Held:
        """What a generator rank has."""
        column = None if self.cut.columns == 1 else rank
        return Held(self.model, self.cut, DTYPE, column=column)

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
    torch: float = 0.0


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


class Yardsticks:
    """What rank 0 measures beside a push, in memory of its own."""

    def __init__(self, job: Job) -> None:
        self._nbytes: Final = job.model.nbytes
        self._source: Final = resident_tensor(job.source_nbytes)
        self._memcpy: Final = Memcpy(self._nbytes)
        memory = self._source, self._memcpy.target
        self._torch: Final = TorchCopy(job.model, job.cut, job.source, *memory)

    def measure(self) -> Copies:
        """Copy once with each."""
        memcpy = self._memcpy.seconds(self._source[: self._nbytes], self._nbytes)
        return Copies(memcpy, self._torch.seconds())

    def close(self) -> None:
        """Let the memory go."""
        self._memcpy.close()


async def train(line: Line, job: Job, rank: int, address: str) -> Kept:
    """Be a trainer rank: for each version fill, wait for the word, push."""
    held = job.pushed(rank)
    yardsticks = Yardsticks(job) if rank == 0 else None
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
            with beat.watching():
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
    return Kept(beat.longest, beat.collector, resident.rise() - job.windows)


async def generate(line: Line, job: Job, number: int, rank: int, address: str) -> Kept:
    """Be a rank of a replica: receive each version, then verify every byte."""
    held = job.received(rank)
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
            with beat.watching():
                update = await transport.receive()
                visible = time.monotonic()
            async with transport.use() as weights:
                verified += held.verify(weights.tensors, version, job.source)
            line.tell(Received(visible, update.switched))
        await line.hear()
        group.cancel_scope.cancel()
    return Kept(beat.longest, beat.collector, resident.rise() - window, verified)
