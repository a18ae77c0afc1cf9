"""SegmentedWindow: several windows that are one to those who put and wait.

Signals are counted for all windows of a process group together, so waiting is as with
one. A put is routed to the segments of its peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weightsync.operation import Operation, Operations
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Backend, ProcessGroup

    from weightsync.segments import Segments


class SegmentedWindow(Window):
    """A window in segments, the first of which is that of the base.

    Args:
        group: as of ``Window``.
        memory: of this rank, for each segment, and what is put straight from; all
            ranks give as many.
        segments: those of each rank that is put to, and of this one if it copies into
            more than the first. Offsets count through all segments of a rank.
    """

    def __init__(
        self,
        group: ProcessGroup | Backend,
        memory: Sequence[Tensor],
        segments: Mapping[int, Segments],
    ) -> None:
        super().__init__(group, memory[0])
        self._segments: Final = segments
        self._parts: Final = [Window(group, part) for part in memory[1:]]

    @property
    def nbytes(self) -> int:
        """Size of this rank's memory in bytes."""
        return super().nbytes + sum([part.nbytes for part in self._parts])

    def put_many(self, tensors: Sequence[Tensor], runs: Tensor, peer: int) -> Operation:
        """As ``Window.put_many``, in one call for each segment, in the order of runs.

        No run crosses from one segment to the next.
        """
        return _together(
            [
                super(SegmentedWindow, self).put_many(tensors, part, peer)
                if index == 0
                else self._parts[index - 1].put_many(tensors, part, peer)
                for index, part in self._routed(runs, peer)
            ]
        )

    def prepare(self, runs: Tensor, peer: int) -> None:
        """As ``Window.prepare``."""
        for index, part in self._routed(runs, peer):
            if index == 0:
                super().prepare(part, peer)
            else:
                self._parts[index - 1].prepare(part, peer)

    def connect(self, peers: Sequence[int]) -> None:
        """As ``Window.connect``."""
        super().connect(peers)
        for part in self._parts:
            part.connect(peers)

    def copy_in_order(self, tensors: Sequence[Tensor], runs: Tensor) -> None:
        """As ``Window.copy_in_order``."""
        for index, part in self._routed(runs, self.rank):
            if index == 0:
                super().copy_in_order(tensors, part)
            else:
                self._parts[index - 1].copy_in_order(tensors, part)

    def close(self) -> None:
        """As ``Window.close``."""
        for part in self._parts:
            part.close()
        super().close()

    def _routed(self, runs: Tensor, peer: int) -> list[tuple[int, Tensor]]:
        segments = self._segments.get(peer)
        return [(0, runs)] if segments is None else segments.route(runs)


def _together(operations: Sequence[Operation]) -> Operation:
    return operations[0] if len(operations) == 1 else Operations(operations)
