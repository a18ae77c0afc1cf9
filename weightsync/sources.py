"""Which trainer rank sends what, where several hold the same: one copy of each tensor.

The choice depends on the trainers alone. So every replica gets a tensor from the same
ranks, and never one that is mixed from copies that might differ.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from weightsync.holdings import Group, Held, Holdings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.spec import Box, Manifest


class Sources:
    """What the trainer ranks hold together, and who sends it."""

    def __init__(self, trainers: Sequence[Manifest]) -> None:
        self.holdings = Holdings(trainers)
        self._copy: dict[str, int] = {}
        self._choose(len(trainers))

    def copy(self, name: str) -> int:
        """The number of the copy that is sent; see ``sender``."""
        return self._copy.get(name, 0)

    def _choose(self, ranks: int) -> None:
        """Give each name to the copy whose ranks have the least to send so far.

        What leaves no choice comes first, then what is large.
        """
        load = [0] * ranks
        groups = sorted(self.holdings.groups, key=_order)
        for group in groups:
            copies = copies_of(group)
            counts = [len(group.names)] if copies < 2 else self._spread(group, load)
            for copy, count in enumerate(counts):
                for box in group.boxes:
                    held = sender(group, box, copy)
                    load[held.rank] += count * held.kind.nbytes

    def _spread(self, group: Group, load: Sequence[int]) -> list[int]:
        """Choose a copy for each name of a group; return how many each copy got."""
        step = max(held.kind.nbytes for held in group.held)
        copies = range(copies_of(group))
        heap = [
            (max(load[sender(group, box, copy).rank] for box in group.boxes), copy)
            for copy in copies
        ]
        heapq.heapify(heap)
        counts = [0 for _ in copies]
        for name in group.names:
            busy, copy = heap[0]
            heapq.heapreplace(heap, (busy + step, copy))
            counts[copy] += 1
            self._copy[name] = copy
        return counts


def copies_of(group: Group) -> int:
    """How many ranks hold the box that most ranks hold; 0 where all is empty."""
    return max([len(held) for held in group.holders.values()], default=0)


def sender(group: Group, box: Box, copy: int) -> Held:
    """The piece of a box that is sent where a copy was chosen."""
    pieces = group.holders[box]
    return pieces[copy % len(pieces)]


def _order(group: Group) -> tuple[bool, int]:
    """Sorts groups without a choice first, then by the size of their tensors."""
    size = sum([group.holders[box][0].kind.nbytes for box in group.boxes])
    return copies_of(group) > 1, -size
