"""Casts of a plan, cut into batches that are converted in a bounded scratch buffer.

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
    """Rows of a packed source that are converted to bytes of a half.

    ``start``, ``row_numel`` and ``stride`` count elements, ``at`` bytes of the half.
    """

    source: int
    start: int
    rows: int
    row_numel: int
    stride: int
    dtype: torch.dtype
    at: int

    def run(self, tensors: Sequence[Tensor], half: Tensor) -> None:
        """Convert. Raises RuntimeError where the source has lost its memory."""
        source = tensors[self.source]
        shape = (self.rows, self.row_numel)
        end = self.at + self.rows * self.row_numel * self.dtype.itemsize
        with torch.inference_mode():
            rows = source.as_strided(
                shape, (self.stride, 1), source.storage_offset() + self.start
            )
            half[self.at : end].view(self.dtype).view(shape).copy_(rows)


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
    conversions: list[Conversion] = []
    runs: list[Sequence[int]] = []
    for (name, run), at in group:
        dtype: torch.dtype = getattr(torch, name)
        size = dtype.itemsize
        conversions.append(
            Conversion(
                run.source,
                run.source_offset // size,
                run.rows,
                run.row_bytes // size,
                run.source_stride // size,
                dtype,
                at,
            )
        )
        runs.append(
            run._replace(source=0, source_offset=at, source_stride=run.row_bytes)
        )
    return Batch(tuple(conversions), table(runs, base))
