"""What case ``backend`` issues: calls of a group or a window, and what they leave.

Whoever measures prepares, lets all ranks meet, calls, synchronizes, lets them meet
again and checks. All of that is done by both ranks, with the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from weightsync.bench.patterns import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

BATCH: Final = 16
"""Calls that follow each other: few enough that their sum fits the word."""

WORD_BYTES: Final = 4


class Kind(Protocol):
    """One kind of call, on one backend."""

    calls: int
    """Of a batch."""

    def prepare(self, number: int) -> None:
        """Enqueue what the calls need, with values that belong to ``number``."""
        ...

    def call(self, index: int) -> None:
        """Do what is measured."""
        ...

    def check(self, number: int) -> int:
        """Return the bytes that are as they must be; raise VerificationError."""
        ...


class Reduce:
    """An all-reduce of one word, which it doubles once both ranks have the same."""

    calls = BATCH

    def __init__(self, side: Side, *, later: bool) -> None:
        self._group, self._later = side.group, later
        self._word = torch.empty(1, dtype=torch.int32, device=side.device)

    def prepare(self, number: int) -> None:
        """Write a value that differs between the ranks."""
        self._word.copy_(torch.tensor([number + dist.get_rank()], dtype=torch.int32))

    def call(self, index: int) -> None:  # noqa: ARG002  # All are alike.
        """Issue one."""
        work = dist.all_reduce(self._word, group=self._group, async_op=self._later)
        if work is not None:
            work.wait()

    def check(self, number: int) -> int:
        """Compare the sum."""
        expected = [(2 * number + 1) << (BATCH - 1)]
        if (found := self._word.tolist()) != expected:
            raise VerificationError(f"all-reduces gave {found}, expected {expected}")
        return WORD_BYTES


class Put:
    """Puts of one word each into the window of the other rank, side by side."""

    calls = BATCH

    def __init__(self, side: Side, *, later: bool) -> None:
        self._side, self._later = side, later
        self._words = [side.source[index : index + 1] for index in range(BATCH)]

    def prepare(self, number: int) -> None:
        """Write what is put."""
        self._side.source.copy_(_values(number, dist.get_rank()))

    def call(self, index: int) -> None:
        """Issue one."""
        side = self._side
        work = side.window.put(self._words[index], side.other, index, self._later)
        if self._later:
            work.wait()

    def check(self, number: int) -> int:
        """Take the signals of the other rank, and compare what it has put."""
        for _ in range(BATCH):
            self._side.wait()
        return self._side.compare(number)


class PutMany(Put):
    """As many puts at once: in one call of ours, one after the other by torch's."""

    calls = 1

    def __init__(self, side: Side) -> None:
        super().__init__(side, later=False)
        spots = torch.arange(BATCH) * WORD_BYTES
        runs = torch.zeros((BATCH, 7), dtype=torch.int64)
        runs[:, 1] = runs[:, 2] = spots
        runs[:, 3], runs[:, 4] = 1, WORD_BYTES
        self._runs, self._sources = runs, [side.source]
        self._at_once = hasattr(side.window, "put_many")

    def call(self, index: int) -> None:  # noqa: ARG002  # There is one.
        """Issue all."""
        side = self._side
        if self._at_once:
            side.window.put_many(self._sources, self._runs, side.other, BATCH, False)
            return
        for spot, word in enumerate(self._words):
            side.window.put(word, side.other, spot, False)


class Wait(Put):
    """Waits for signals that are there already."""

    def __init__(self, side: Side) -> None:
        super().__init__(side, later=False)

    def prepare(self, number: int) -> None:
        """Put everything, with its signals."""
        super().prepare(number)
        for index in range(BATCH):
            super().call(index)

    def call(self, index: int) -> None:  # noqa: ARG002  # All are alike.
        """Issue one."""
        self._side.wait()

    def check(self, number: int) -> int:
        """Compare what the other rank has put."""
        return self._side.compare(number)


KINDS: Final[Mapping[str, Callable[[Side], Kind]]] = {
    "all_reduce": lambda side: Reduce(side, later=False),
    "all_reduce, asynchronous": lambda side: Reduce(side, later=True),
    "put": lambda side: Put(side, later=False),
    "put, asynchronous": lambda side: Put(side, later=True),
    f"{BATCH} puts": PutMany,
    "wait_signal": Wait,
}


class Side:
    """One backend: its group of two ranks, and a window of a word for each call."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.other = 1 - dist.get_rank()
        backend = group._get_backend(device)
        # Freeing this memory would be more work of the window, so it is kept.
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.source, self._target = (
                torch.empty(BATCH, dtype=torch.int32, device=device) for _ in range(2)
            )
        self.window: Any = group.new_window(self._target)

    def wait(self) -> None:
        """Take one signal of the other rank."""
        self.window.wait_signal(self.other, False)

    def compare(self, number: int) -> int:
        """Return the bytes that the other rank was to put, if they are here."""
        torch.cuda.synchronize()
        found, expected = self._target.tolist(), _values(number, self.other).tolist()
        if found != expected:
            raise VerificationError(f"puts left {found}, expected {expected}")
        return BATCH * WORD_BYTES

    def close(self) -> None:
        """Close the window, which both ranks do."""
        self.window.tensor_deregister()


def _values(number: int, rank: int) -> Tensor:
    first = BATCH * (2 * number + rank)
    return torch.arange(first, first + BATCH, dtype=torch.int32)
