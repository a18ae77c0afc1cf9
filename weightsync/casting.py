"""Casts of a plan, and the batches of those that go through a scratch buffer.

A conversion is torch's own ``copy_``, so it rounds as ``Tensor.to`` does. A NaN stays a
NaN; which of them it becomes torch does not say, and it depends on the place in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weightsync.plan import ALIGNMENT, CAST_BYTES
from weightsync.slots import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from weightsync.plan import Cast

HALF_BYTES: Final = CAST_BYTES
"""Bytes of each half of a scratch buffer: one is put while the other is filled.

A cast is at most as large. With halves of 1 to 8 MiB a conversion takes the same time
as one of the whole tensor at once, with smaller ones longer.
"""


class Conversion(NamedTuple):
    """Rows of a packed source that are converted to bytes of a buffer.

    ``start``, ``row_numel`` and ``stride`` count elements, ``at`` bytes of the buffer.
    """

    source: int
    start: int
    rows: int
    row_numel: int
    stride: int
    dtype: torch.dtype
    at: int

    @classmethod
    def of(cls, cast: Cast, at: int) -> Conversion:
        """Of a cast whose rows lie together at a byte of the buffer."""
        name, run = cast
        dtype: torch.dtype = getattr(torch, name)
        size = dtype.itemsize
        start, numel = run.source_offset // size, run.row_bytes // size
        stride = run.source_stride // size
        return cls(run.source, start, run.rows, numel, stride, dtype, at)

    def run(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Convert: one kernel, where both are on one GPU.

        Raises RuntimeError where the source has lost its memory.
        """
        source = tensors[self.source]
        shape = (self.rows, self.row_numel)
        end = self.at + self.rows * self.row_numel * self.dtype.itemsize
        with torch.inference_mode():
            rows = source.as_strided(
                shape, (self.stride, 1), source.storage_offset() + self.start
            )
            buffer[self.at : end].view(self.dtype).view(shape).copy_(rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is converted into one half, and the runs that put it from there.

    In ``runs``, a table for ``Window.put_many``, tensor 0 is the half.
    """

    conversions: tuple[Conversion, ...]
    runs: Tensor

    def with_runs(self, runs: Tensor) -> Batch:
        """Return the same with other runs."""
        return replace(self, runs=runs)


class Scratch:
    """Two halves of ``HALF_BYTES``; allocated when they are used first."""

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Both, uint8. Raises RuntimeError where there is no memory."""
        memory = torch.empty(2 * HALF_BYTES, dtype=torch.uint8, device="cpu")
        return memory[:HALF_BYTES], memory[HALF_BYTES:]


def batches(casts: Iterable[Cast], base: int) -> tuple[Batch, ...]:
    """Cut casts into batches, in order; a slot begins at byte ``base`` of a window.

    Each row of a cast remains one row, so a batch signals as often as its casts do.
    """
    return tuple([_batch(group, base) for group in _groups(casts)])


def _groups(casts: Iterable[Cast]) -> Iterator[list[tuple[Cast, int]]]:
    """Casts that fit into a half together, and where each begins there."""
    group: list[tuple[Cast, int]] = []
    end = 0
    for cast in casts:
        if end + cast.run.nbytes > HALF_BYTES:
            yield group
            group, end = [], 0
        group.append((cast, end))
        end += cast.run.nbytes + -cast.run.nbytes % ALIGNMENT
    if group:
        yield group


def _batch(group: Sequence[tuple[Cast, int]], base: int) -> Batch:
    conversions = tuple([Conversion.of(cast, at) for cast, at in group])
    runs = [
        run._replace(source=0, source_offset=at, source_stride=run.row_bytes)
        for (_, run), at in group
    ]
    return Batch(conversions, table(runs, base))
