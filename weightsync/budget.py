"""How much GPU memory a trainer rank takes for its transfers over NCCL; pure.

Chunks, which are filled and put, and a filler, which is registered for the segments of
others: NCCL compares where a put begins with what the putting rank has registered. The
filler is as large as the largest segment, and no larger replica needs more.
"""

from __future__ import annotations

from typing import Final

from weightsync.errors import PlanError
from weightsync.packing import CHUNK_BYTES

SEGMENT_BYTES: Final = 256 << 20
"""Bytes of a segment, unless the generator says otherwise or a tensor is larger.

Each is registered by all ranks together when a link is formed: 64 of them for 16 GiB.
"""

LEAST_SEGMENT: Final = 4096
"""Bytes; NCCL takes 2 MiB for it anyway."""

_GRANULARITY: Final = 2 << 20
"""NCCL allocates multiples of it."""


def rounded(nbytes: int) -> int:
    """Return what NCCL takes for so many bytes."""
    return nbytes + -nbytes % _GRANULARITY


FEW: Final = rounded(8 * CHUNK_BYTES)
"""The least: some are left where transfers that are stuck hold the others."""

MANY: Final = rounded(32 * CHUNK_BYTES)
"""Enough for 16 transfers at once."""


class Budget:
    """What may be taken, at most ``given`` bytes of memory, if any are given.

    Raises PlanError where these are too few for any transfer.
    """

    def __init__(self, given: int | None) -> None:
        if given is not None and given < FEW:
            message = f"staging_bytes={given} is too little: {FEW} are the least"
            raise PlanError(message)
        self._given: Final = given
        self._largest = 0
        self._taken = 0

    def chunks(self, first: int = 0, *, cut: bool) -> int:
        """Return the bytes of all chunks; more where windows are ``cut``.

        ``first`` are those of the segment that is registered with them. Raises
        PlanError where that is larger, as a large window in one piece is, in a budget.
        """
        if self._given is None:
            return max(MANY if cut else FEW, rounded(first))
        half = self._given // 2
        found = min(max(half - half % _GRANULARITY, FEW), MANY)
        if first > found:
            message = f"the window of this replica is one piece of {first} bytes"
            raise PlanError(f"staging_bytes={self._given} bounds nothing: {message}")
        return found

    def check(self, largest: int) -> None:
        """Raise PlanError unless there is enough for segments of so many bytes."""
        if self._given is None or largest <= self._largest:
            return
        needed = self._taken + rounded(largest)
        if self.chunks(cut=True) + needed > self._given:
            enough = needed + min(max(needed, FEW), MANY)
            message = (
                f"staging_bytes={self._given} is too little for this replica: NCCL "
                f"wants as much registered here as its largest segment has, "
                f"{largest} bytes; staging_bytes={enough} would do, or a smaller "
                f"segment_bytes of its generators where no tensor is so large"
            )
            raise PlanError(message)

    def take(self, largest: int) -> int:
        """Return the bytes of a filler for such segments, which passed ``check``.

        It counts for good: links that use a smaller one may live as long as this.
        """
        self._largest = rounded(largest)
        self._taken += self._largest
        return self._largest
