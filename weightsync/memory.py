"""The memory of a generator rank's window: one tensor for each of its segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.backend import repoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightsync.segments import Segments


class Memory(NamedTuple):
    """Segments and their memory; its bytes are counted through, from 0 on."""

    tensors: Sequence[Tensor]
    segments: Segments

    def view(self, start: int, nbytes: int) -> Tensor:
        """Return bytes that lie in one segment."""
        index, begin = self.segments.at(start) if nbytes else (0, 0)
        return self.tensors[index][begin : begin + nbytes]

    def lodge(self, storages: Sequence[tuple[Tensor, int]]) -> None:
        """Let storages live here, each from a byte on.

        Raises PlanError for one that does not fit, before any is changed.
        """
        places = [self.segments.at(start) for _, start in storages]
        memory = [self.tensors[index] for index, _ in places]
        repoint([tensor for tensor, _ in storages], memory, [at for _, at in places])
