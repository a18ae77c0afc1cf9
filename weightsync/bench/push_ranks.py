"""The processes of the case ``push``: trainer ranks and generators, as users write.

Each follows the director in ``push.py``; what is timed is nothing but the call of
``push`` and the return of ``receive``. The clock is CLOCK_MONOTONIC, common to all
processes of a host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import anyio
import torch

import weightsync
from weightsync.bench.heartbeat import Heartbeat
from weightsync.bench.memory import Memcpy, Resident, resident_tensor
from weightsync.bench.patterns import fill, verify
from weightsync.epoch import Mode
from weightsync.layout import register
from weightsync.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from weightsync.bench.runner import Line

ModeName = Literal["staged", "swap", "inplace"]

TIMEOUT_SECONDS: Final = 120.0
ROW_BYTES: Final = 2048
SMALL_BYTES: Final = 8 << 10


@dataclass(frozen=True, slots=True)
class Model:
    """A state dict: the bytes of each of its bfloat16 tensors."""

    case: Literal["model", "small", "one"]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @classmethod
    def like_a_transformer(cls, total: int, tensors: int) -> Model:
        """Build one of about ``total`` bytes: embeddings, matrices, many small ones.

        Two embeddings have an eighth of the bytes each, two tensors of five have 8 KiB,
        as norms and biases do, and the others share the rest. Sizes are multiples of
        2 KiB.
        """
        small = 2 * tensors // 5
        embeddings = min(2, tensors - small)
        matrices = tensors - small - embeddings
        large = total - small * SMALL_BYTES
        embedding = large // (8 if matrices else max(embeddings, 1))
        sizes = [embedding] * embeddings + [SMALL_BYTES] * small
        if matrices:
            sizes += [(large - embeddings * embedding) // matrices] * matrices
        return cls("model", tuple(_rounded(size) for size in sizes))

    @classmethod
    def many_small(cls, tensors: int, nbytes: int) -> Model:
        """``tensors`` of ``nbytes`` each."""
        return cls("small", (nbytes,) * tensors)

    @classmethod
    def one_large(cls, nbytes: int) -> Model:
        """Build one tensor."""
        return cls("one", (nbytes,))

    def tensors(self) -> dict[str, Tensor]:
        """Allocate it, every page present."""
        return {
            f"layers.{index}.weight": resident_tensor(size).view(torch.bfloat16)
            for index, size in enumerate(self.sizes)
        }


def _rounded(nbytes: int) -> int:
    return max(nbytes // ROW_BYTES, 1) * ROW_BYTES


def window_nbytes(tensors: Mapping[str, Tensor], mode: ModeName) -> int:
    """Bytes of the window of a generator that registers these tensors."""
    return Slots.of(Mode(mode), register(tensors).manifest).nbytes


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes of one measurement agree on."""

    model: Model
    mode: ModeName
    trainers: int
    replicas: int
    versions: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push, as a trainer rank saw it. ``memcpy`` is 0 but on rank 0."""

    called: float
    returned: float
    memcpy: float


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


async def train(line: Line, job: Job, rank: int, address: str) -> Kept:
    """Be a trainer rank: for each version fill, wait for the word, push."""
    tensors = job.model.tensors()
    source = resident_tensor(job.model.nbytes) if rank == 0 else None
    copy = Memcpy(job.model.nbytes) if rank == 0 else None
    windows = job.replicas * window_nbytes(tensors, job.mode)
    resident, beat = Resident(), Heartbeat()
    async with (
        weightsync.Trainer(
            address, rank=rank, world_size=job.trainers, timeout=TIMEOUT_SECONDS
        ) as transport,
        anyio.create_task_group() as group,
    ):
        line.tell(transport.address)
        await transport.wait_for_replicas(job.replicas)
        group.start_soon(beat.run)
        line.tell("ready")
        for version in range(1, job.versions + 1):
            await line.hear()
            for index, tensor in enumerate(tensors.values()):
                fill(tensor, version, index)
            seconds = 0.0
            if copy is not None and source is not None:
                seconds = copy.seconds(source, job.model.nbytes)
            line.tell("filled")
            await line.hear()
            with beat.watching():
                called = time.monotonic()
                await transport.push(tensors, version=version, require="all")
                returned = time.monotonic()
            line.tell(Pushed(called, returned, seconds))
        await line.hear()
        group.cancel_scope.cancel()
    if copy is not None:
        copy.close()
    return Kept(beat.longest, beat.collector, resident.rise() - windows)


async def generate(line: Line, job: Job, number: int, address: str) -> Kept:
    """Be a replica of one rank: receive each version, then verify every byte."""
    tensors = job.model.tensors()
    window = window_nbytes(tensors, job.mode)
    resident, beat = Resident(), Heartbeat()
    name, verified = f"replica-{number}", 0
    async with (
        weightsync.Generator(
            address,
            tensors,
            replica=name,
            rank=0,
            world_size=1,
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
                for index, (key, tensor) in enumerate(weights.tensors.items()):
                    what = f"version {weights.version} of {key!r}"
                    verify(tensor, version, index, what=what)
                    verified += tensor.nbytes
            line.tell(Received(visible, update.switched))
        await line.hear()
        group.cancel_scope.cancel()
    return Kept(beat.longest, beat.collector, resident.rise() - window, verified)
