"""One transfer as a trainer rank puts it: what each rank was sent, and how to stop.

What is put as it is goes in one batch for each generator rank. What is converted
follows batch by batch through a scratch buffer, on a thread of its own. The header of a
generator rank is in the last batch.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weightsync.errors import ClosedError, PlanError, WeightSyncError
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.casting import Batch, Scratch
    from weightsync.operation import Operation
    from weightsync.packing import Packed
    from weightsync.window import Window


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one generator rank is sent, but for the values: tables of runs.

    ``peer`` is its rank in the process group. The header comes last: in ``runs`` it is
    the tensor after all that are pushed, or, in the last of ``casts``, tensor 1. Where
    sources have to be copied first there is nothing but ``packed``. Where some are put
    as they lie, ``copied`` is for the same sources in other memory.
    """

    peer: int
    runs: Tensor | None
    casts: tuple[Batch, ...]
    packed: tuple[Packed, ...] = ()
    copied: tuple[Packed, ...] = ()

    @property
    def tables(self) -> list[Tensor]:
        """All tables of runs."""
        runs = [] if self.runs is None else [self.runs]
        runs += [batch.runs for batch in self.casts]
        return runs + [packed.runs for packed in (*self.packed, *self.copied)]


class Addressed(NamedTuple):
    """A parcel, the generator rank that it is for, and the header that goes with it."""

    rank: int
    parcel: Parcel
    header: Tensor


class Put(NamedTuple):
    """One call that puts, and the signals that it sends in the end."""

    rank: int
    signals: int
    operation: Operation


class Sending:
    """The puts of one transfer. Any thread may ``stop`` it.

    ``sent`` are the signals sent to each generator rank, ``failure`` is the first error
    that ended it. ``after`` is the mark of what comes before the values are final.
    """

    def __init__(
        self,
        window: Window,
        ranks: int,
        scratch: Any,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.sent: Final = [0] * ranks
        self.failure: WeightSyncError | None = None
        self.after: Any = None
        self._window: Final = window
        self._scratch: Final[Scratch] = scratch
        self._naming: Final = naming
        self._stopped: Final = threading.Event()
        self._under_way: dict[int, Operation] = {}

    def stop(self) -> None:
        """Put no more. What is under way ends between two slices, or is finished."""
        self._stopped.set()
        # Whoever starts one at this moment sees that all is stopped, and aborts it.
        for operation in list(self._under_way.values()):
            self._abort(operation)

    async def run(
        self,
        tensors: Sequence[Tensor],
        parcels: Sequence[Addressed],
        names: Sequence[str],
    ) -> None:
        """Put everything, or until stopped; no tensor is read after it returned."""
        started: list[Put] = []
        for rank, parcel, header in parcels:
            if parcel.runs is not None:
                sources = [*tensors, header]
                started += self._start(rank, parcel.peer, sources, parcel.runs)
        try:
            if any(one.parcel.casts for one in parcels):
                args = tensors, parcels, names
                await in_thread(self._stream, *args, cancel=self.stop)
            for put in started:
                with self._counted(put):
                    await put.operation
        finally:
            self.stop()

    def _stream(
        self,
        tensors: Sequence[Tensor],
        parcels: Sequence[Addressed],
        names: Sequence[str],
    ) -> None:
        """Convert into one half of the scratch while the other is put."""
        batches = [(one, batch) for one in parcels for batch in one.parcel.casts]
        puts: list[list[Put]] = [[], []]
        for number, (one, batch) in enumerate(batches):
            index = number % 2
            self._wait(puts[index])
            half = self._filled(index, batch, tensors, names)
            if half is None:
                break
            sources = [half, one.header]
            puts[index] = self._start(one.rank, one.parcel.peer, sources, batch.runs)
        for left in puts:
            self._wait(left)

    def _filled(
        self,
        index: int,
        batch: Batch,
        tensors: Sequence[Tensor],
        names: Sequence[str],
    ) -> Tensor | None:
        """A half with a batch in it; None where that failed or all is stopped."""
        doing = "allocate a buffer to convert in"
        try:
            half = self._scratch.halves[index]
            for conversion in batch.conversions:
                if self._stopped.is_set():
                    return None
                doing = f"convert {names[conversion.source]!r} to {conversion.dtype}"
                conversion.run(tensors, half)
        except RuntimeError as error:
            self._fail(PlanError(f"cannot {doing}: {error}"))
            return None
        return half

    def _start(
        self, rank: int, peer: int, sources: Sequence[Tensor], runs: Tensor
    ) -> list[Put]:
        """Start to put; nothing where that fails or all is stopped."""
        if self._stopped.is_set():
            return []
        try:
            with self._naming():
                operation = self._window.put_many(sources, runs, peer)
        except WeightSyncError as error:
            self._fail(error)
            return []
        self._under_way[id(operation)] = operation
        if self._stopped.is_set():
            self._abort(operation)
        return [Put(rank, int(runs[:, 3].sum()), operation)]

    def _abort(self, operation: Operation) -> None:
        """Give one up that is under way."""
        operation.abort()

    def _wait(self, puts: list[Put]) -> None:
        """Wait on this thread, and take the puts off the list: each counts once."""
        while puts:
            put = puts.pop(0)
            with self._counted(put):
                put.operation.wait()

    @contextmanager
    def _counted(self, put: Put) -> Generator[None]:
        """Count the signals of a put when it has ended well."""
        try:
            with self._naming():
                yield
        except ClosedError:
            pass  # stopped: it has sent no signal
        except WeightSyncError as error:
            self._fail(error)
        else:
            self.sent[put.rank] += put.signals
        finally:
            self._under_way.pop(id(put.operation), None)

    def _fail(self, error: WeightSyncError) -> None:
        self.failure = self.failure or error
        self.stop()
