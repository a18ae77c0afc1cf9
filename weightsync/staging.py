"""A transfer through memory that NCCL knows: a copy of the source is put, not itself.

The staging memory of a trainer rank is one allocation in chunks, registered by each of
its links. A transfer takes two chunks, packs into one while the other is put, and reads
no tensor of the caller once it is over, whatever became of its puts. Where the caller's
memory is registered too (``straight.py``), most of a transfer is put out of that, and
what an abort has left behind may still read it: see ``Staging.take``. What is converted
is converted into a chunk, where other pieces are copied.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weightsync.errors import PlanError, WeightSyncError
from weightsync.lane import as_ours
from weightsync.packing import CHUNK_BYTES, HEADER_AT
from weightsync.runtime import in_thread
from weightsync.sending import Sending
from weightsync.slots import HEADER_BYTES
from weightsync.uncancelled import to_the_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.casting import Conversion
    from weightsync.engine_nccl import NcclEngine
    from weightsync.lane import Lane
    from weightsync.operation import Operation
    from weightsync.packing import Packed
    from weightsync.sending import Addressed, Parcel, Put
    from weightsync.window import Window

_LOOK_SECONDS: Final = 0.1


class Chunk(NamedTuple):
    """One chunk, where it begins in the window of the trainer rank, and its header.

    The header is on the host, pinned: else the host would wait for its copy, and so
    for all that is packed before.
    """

    memory: Tensor
    start: int
    header: Tensor


class Staging:
    """The chunks of one allocation. Any thread may take some."""

    def __init__(self, memory: Tensor) -> None:
        self.memory: Final = memory
        self._changed = threading.Condition()
        self._count: Final = memory.numel() // CHUNK_BYTES
        headers = torch.empty(
            self._count, HEADER_BYTES, dtype=torch.uint8, pin_memory=memory.is_cuda
        )
        self._free = [
            Chunk(memory[start : start + CHUNK_BYTES], start, header)
            for start, header in zip(
                range(0, self._count * CHUNK_BYTES, CHUNK_BYTES), headers, strict=True
            )
        ]

    def take(self, stopped: threading.Event) -> list[Chunk]:
        """Take two chunks, or one where few are left; none when stopped. Blocks.

        A put that an abort has left behind may still read a chunk that is taken again.
        What it carries then goes to a replica that was removed, into a slot that never
        becomes whole.
        """
        with self._changed:
            while not self._free and not stopped.is_set():
                self._changed.wait(_LOOK_SECONDS)
            if stopped.is_set():
                return []
            count = 2 if 2 * len(self._free) > self._count else 1
            found, self._free = self._free[:count], self._free[count:]
            return found

    def give_back(self, chunks: list[Chunk]) -> None:
        """Let others take them."""
        with self._changed:
            self._free += chunks
            self._changed.notify_all()


class StagedSending(Sending):
    """The puts of one transfer, all of them from chunks.

    What NCCL was given it does not give back: ``stop`` ends it after the puts that are
    under way, and these end with the link at the latest.
    """

    def __init__(
        self,
        window: Window,
        ranks: int,
        staging: Staging,
        naming: Callable[[], AbstractContextManager[None]],
        engine: NcclEngine,
    ) -> None:
        super().__init__(window, ranks, None, naming)
        self._staging: Final = staging
        self._engine: Final = engine
        self._names: Sequence[str] = ()

    def stop(self) -> None:
        """Put no more than what is under way."""
        self._stopped.set()

    async def run(
        self,
        tensors: Sequence[Tensor],
        parcels: Sequence[Addressed],
        names: Sequence[str],
    ) -> None:
        """Put everything, or until stopped; no tensor is read after it returned."""
        self._names = names
        await to_the_end(self._put_all, tensors, parcels, cancel=self.stop)

    async def _put_all(
        self, tensors: Sequence[Tensor], parcels: Sequence[Addressed]
    ) -> None:
        chunks = await in_thread(self._staging.take, self._stopped)
        try:
            async with self._engine.lane() as lane:
                lane.follow(self.after or ())
                await self._flow(lane, chunks, tensors, parcels)
        except WeightSyncError as error:  # of a device that has failed
            self._fail(error)
        finally:
            self._staging.give_back(chunks)

    async def _flow(
        self,
        lane: Lane,
        chunks: Sequence[Chunk],
        tensors: Sequence[Tensor],
        parcels: Sequence[Addressed],
    ) -> None:
        """Pack one chunk while the other is put.

        The host waits until a chunk is free, and not the stream: what it packs for a
        put that never ends would read the caller's tensors when ``run`` has returned.
        """
        batches = [
            (one, packed)
            for one in parcels
            for packed in _batches_of(one.parcel, tensors)
        ]
        puts: list[list[Put]] = [[] for _ in chunks]
        for number, (one, packed) in enumerate(batches if chunks else ()):
            index = number % len(chunks)
            await self._over(puts[index])
            puts[index] = await lane.run(
                self._issue, tensors, one, packed, chunks[index]
            )
            if not puts[index]:
                break
        for left in puts:
            await self._over(left)

    def _issue(
        self, tensors: Sequence[Tensor], one: Addressed, packed: Packed, chunk: Chunk
    ) -> list[Put]:
        if not self._packed(tensors, one, packed, chunk):
            return []
        sources = [chunk.memory, *[tensors[index] for index in packed.sources]]
        return self._start(one.rank, one.parcel.peer, sources, packed.runs)

    async def _over(self, puts: list[Put]) -> None:
        while puts:
            put = puts.pop()
            with self._counted(put):
                await put.operation

    def _packed(
        self, tensors: Sequence[Tensor], one: Addressed, packed: Packed, chunk: Chunk
    ) -> bool:
        """Pack a chunk; False where that fails or all is stopped."""
        if self._stopped.is_set():
            return False
        runs = packed.copies.clone()
        runs[:, 2] += chunk.start
        try:
            if len(runs):
                self._window.copy_in_order(tensors, runs)
        except (WeightSyncError, RuntimeError) as error:
            self._fail(as_ours(error))
            return False
        if not all(self._converted(tensors, one, chunk) for one in packed.conversions):
            return False
        if packed.header:
            chunk.header.copy_(one.header)
            place = chunk.memory[HEADER_AT : HEADER_AT + HEADER_BYTES]
            place.copy_(chunk.header, non_blocking=True)
        return True

    def _converted(
        self, tensors: Sequence[Tensor], conversion: Conversion, chunk: Chunk
    ) -> bool:
        """Convert into a chunk: on the GPU, or on the host what is kept for replays."""
        if self._stopped.is_set():
            return False
        try:
            conversion.run(tensors, chunk.memory)
        except RuntimeError as error:
            lost = not isinstance(error, torch.AcceleratorError)  # else of the device
            kind = PlanError if lost else WeightSyncError
            what = f"{self._names[conversion.source]!r} to {conversion.dtype}"
            self._fail(kind(f"cannot convert {what}: {error}"))
            return False
        return True

    def _start(
        self, rank: int, peer: int, sources: Sequence[Tensor], runs: Tensor
    ) -> list[Put]:
        try:
            return super()._start(rank, peer, sources, runs)
        except (RuntimeError, ValueError) as error:  # what NCCL refuses at the call
            self._fail(as_ours(error))
            return []

    def _abort(self, operation: Operation) -> None:
        """Leave it: it has begun."""


def _batches_of(parcel: Parcel, tensors: Sequence[Tensor]) -> tuple[Packed, ...]:
    """What is put of these tensors; what is kept for a replay lies on the host."""
    on_host = parcel.copied and not all(tensor.is_cuda for tensor in tensors)
    return parcel.copied if on_host else parcel.packed
