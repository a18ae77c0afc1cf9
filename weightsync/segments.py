"""Segments: a window as several allocations of bounded size; pure.

Everything above counts the bytes of a window through, from 0 on. Here these become a
segment and a byte in it. No tensor or storage crosses from one segment to the next.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.runs import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each segment begins, the first at 0, and where the last one ends."""

    starts: tuple[int, ...]
    end: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each segment."""
        ends = (*self.starts[1:], self.end)
        pairs = zip(self.starts, ends, strict=True)
        return tuple([end - start for start, end in pairs])

    def at(self, offset: int) -> tuple[int, int]:
        """Return the segment of a byte, and which of its bytes it is."""
        index = bisect_right(self.starts, offset) - 1
        return index, offset - self.starts[index]

    def route(self, runs: Tensor) -> list[tuple[int, Tensor]]:
        """Return a table of runs by the segments of their targets, in its order.

        What goes to one segment and stands together is one table, and its targets count
        from the start of the segment.
        """
        if len(self.starts) == 1 or not len(runs):
            return [(0, runs)]
        starts = torch.tensor(self.starts, dtype=torch.int64)
        indices = torch.searchsorted(starts, runs[:, 2].contiguous(), right=True) - 1
        moved = runs.clone()
        moved[:, 2] -= starts[indices]
        found, counts = torch.unique_consecutive(indices, return_counts=True)
        parts = torch.split(moved, counts.tolist())
        return list(zip(found.tolist(), parts, strict=True))

    def sources(self, runs: Tensor) -> Tensor:
        """Return runs of which tensor 0 is the window as runs of its segments."""
        starts = torch.tensor(self.starts, dtype=torch.int64)
        found = runs.clone()
        found[:, 0] = torch.searchsorted(starts, runs[:, 1].contiguous(), right=True)
        found[:, 0] -= 1
        found[:, 1] -= starts[found[:, 0]]
        return found


def cuts(items: Iterable[tuple[int, int]], limit: int) -> tuple[int, ...]:
    """Cut what holds these items into parts of ``limit`` bytes; return their starts.

    ``items`` are places that are not cut, as start and size, in order and apart. One
    that is larger than ``limit`` is a part of its own. There is always one part.
    """
    found = [0]
    for start, size in items:
        if start + size - found[-1] > limit and start > found[-1]:
            found.append(start)
    return tuple(found)


def uncrossed(runs: Iterable[Run], starts: Sequence[int]) -> Iterator[Run]:
    """Cut runs where parts begin that come next to each other at the target."""
    for run in runs:
        last = (
            run.target_offset + (run.rows - 1) * run.target_stride + run.row_bytes - 1
        )
        if bisect_right(starts, run.target_offset) == bisect_right(starts, last):
            yield run
        else:
            yield from _cut(run, starts)


def _cut(run: Run, starts: Sequence[int]) -> Iterator[Run]:
    for row in range(run.rows):
        source = run.source_offset + row * run.source_stride
        target = run.target_offset + row * run.target_stride
        end = target + run.row_bytes
        while target < end:
            after = bisect_right(starts, target)
            size = min([end, *starts[after : after + 1]]) - target
            yield Run(run.source, source, target, 1, size, size, size)
            source, target = source + size, target + size
