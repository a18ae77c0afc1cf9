"""A transfer through memory that NCCL knows: a copy of the source is put, not itself.

The staging memory of a trainer rank is one allocation in chunks, registered by each of
its links. A transfer takes two chunks, packs into one while the other is put, and reads
no tensor of the caller once it is over, whatever became of its puts.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from weightsync.errors import WeightSyncError
from weightsync.packing import CHUNK_BYTES, HEADER_AT
from weightsync.runtime import in_thread
from weightsync.sending import Sending
from weightsync.slots import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.engine import Engine
    from weightsync.packing import Packed
    from weightsync.sending import Addressed, Put
    from weightsync.window import Operation, Window

CHUNKS: Final = 8
"""The least there are: some are left where transfers that are stuck hold the others."""

_LOOK_SECONDS: Final = 0.1


class Chunk(NamedTuple):
    """One chunk, and where it begins in the window of the trainer rank."""

    memory: Tensor
    start: int


class Staging:
    """The chunks of one allocation. Any thread may take some."""

    def __init__(self, memory: Tensor) -> None:
        self.memory: Final = memory
        self._changed = threading.Condition()
        self._free = [
            Chunk(memory[start : start + CHUNK_BYTES], start)
            for start in range(0, memory.numel() - CHUNK_BYTES + 1, CHUNK_BYTES)
        ]
        self._count: Final = len(self._free)

    @contextmanager
    def taken(self, stopped: threading.Event) -> Generator[list[Chunk]]:
        """Take two chunks, or one where few are left; none when stopped.

        A put that an abort has left behind may still read a chunk that is taken again.
        What it carries then goes to a replica that was removed, into a slot that never
        becomes whole.
        """
        found = self._take(stopped)
        try:
            yield found
        finally:
            with self._changed:
                self._free += found
                self._changed.notify_all()

    def _take(self, stopped: threading.Event) -> list[Chunk]:
        with self._changed:
            while not self._free and not stopped.is_set():
                self._changed.wait(_LOOK_SECONDS)
            if stopped.is_set():
                return []
            count = 2 if 2 * len(self._free) > self._count else 1
            found, self._free = self._free[:count], self._free[count:]
            return found


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
        engine: Engine,
    ) -> None:
        super().__init__(window, ranks, None, naming)
        self._staging: Final = staging
        self._engine: Final = engine

    def stop(self) -> None:
        """Put no more than what is under way."""
        self._stopped.set()

    async def run(
        self,
        tensors: Sequence[Tensor],
        parcels: Sequence[Addressed],
        names: Sequence[str],  # noqa: ARG002 -- nothing is converted.
    ) -> None:
        """Put everything, or until stopped; no tensor is read after it returned."""
        await in_thread(self._put_all, tensors, parcels, cancel=self.stop)

    def _put_all(self, tensors: Sequence[Tensor], parcels: Sequence[Addressed]) -> None:
        batches = [(one, packed) for one in parcels for packed in one.parcel.packed]
        with (
            self._staging.taken(self._stopped) as chunks,
            self._engine.ordered(self.after),
        ):
            puts: list[list[Put]] = [[] for _ in chunks]
            for number, (one, packed) in enumerate(batches if chunks else ()):
                index = number % len(chunks)
                self._wait(puts[index])
                if not self._packed(tensors, one, packed, chunks[index]):
                    break
                sources = [chunks[index].memory]
                puts[index] = self._start(
                    one.rank, one.parcel.peer, sources, packed.runs
                )
            for left in puts:
                self._wait(left)

    def _packed(
        self, tensors: Sequence[Tensor], one: Addressed, packed: Packed, chunk: Chunk
    ) -> bool:
        """Pack a chunk; False where that fails or all is stopped."""
        if self._stopped.is_set():
            return False
        runs = packed.copies.clone()
        runs[:, 2] += chunk.start
        try:
            self._window.copy_in_order(tensors, runs)
        except (WeightSyncError, RuntimeError) as error:
            self._fail(as_ours(error))
            return False
        if packed.header:
            chunk.memory[HEADER_AT : HEADER_AT + HEADER_BYTES].copy_(one.header)
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


def as_ours(error: Exception) -> WeightSyncError:
    """Return an error of c10d as one of weightsync."""
    if isinstance(error, WeightSyncError):
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}")
