"""How part of one packed box is copied into another: the fewest runs of bytes."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightsync.spec import Box


class Run(NamedTuple):
    """Rows of bytes of one source tensor that go to one slot; one row if contiguous.

    ``source`` is the index in the trainer rank's manifest. Offsets and strides are in
    bytes: in the source counted from the start of that tensor's packed box, in the
    target from the start of the slot.
    """

    source: int
    source_offset: int
    target_offset: int
    rows: int
    row_bytes: int
    source_stride: int
    target_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.row_bytes


class _Dim(NamedTuple):
    """A loop of the copy: how often, and how many bytes each step is on both sides."""

    size: int
    source: int
    target: int


@lru_cache(maxsize=1024)
def copy_runs(
    part: Box,
    source: Box,
    target: Box,
    itemsize: int,
    target_strides: tuple[int, ...] | None = None,
) -> tuple[Run, ...]:
    """Copy ``part``, which is inside both boxes, from ``source`` to ``target``.

    ``source`` is packed, and so is ``target`` unless its strides are given, in bytes.
    The runs are of source 0 and of a target that starts at 0. Two of them are never
    contiguous with each other on both sides: such dimensions are merged.
    """
    source_strides = packed_strides(source.sizes, itemsize)
    if target_strides is None:
        target_strides = packed_strides(target.sizes, itemsize)
    row_bytes, dims = _collapse(part.sizes, source_strides, target_strides, itemsize)
    source_start = _start(part, source, source_strides)
    target_start = _start(part, target, target_strides)
    if not dims:
        whole = row_bytes
        return (Run(0, source_start, target_start, 1, whole, whole, whole),)
    rows = max(dims, key=lambda dim: dim.size)
    dims.remove(rows)
    return tuple(
        [
            Run(
                0,
                source_start + sum(map(mul, steps, [dim.source for dim in dims])),
                target_start + sum(map(mul, steps, [dim.target for dim in dims])),
                rows.size,
                row_bytes,
                rows.source,
                rows.target,
            )
            for steps in product(*[range(dim.size) for dim in dims])
        ]
    )


def in_pieces(run: Run, most: int) -> Iterator[Run]:
    """Cut a run into runs of at most ``most`` bytes each."""
    if run.row_bytes > most:
        for row in range(run.rows):
            source = run.source_offset + row * run.source_stride
            target = run.target_offset + row * run.target_stride
            for at in range(0, run.row_bytes, most):
                size = min(most, run.row_bytes - at)
                yield Run(run.source, source + at, target + at, 1, size, size, size)
        return
    rows = most // max(run.row_bytes, 1)
    for row in range(0, run.rows, rows):
        yield run._replace(
            source_offset=run.source_offset + row * run.source_stride,
            target_offset=run.target_offset + row * run.target_stride,
            rows=min(rows, run.rows - row),
        )


def merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Join runs of one row that follow each other on both sides."""
    last: Run | None = None
    for run in runs:
        if last is not None and _follows(last, run):
            size = last.row_bytes + run.row_bytes
            last = Run(*last[:3], 1, size, size, size)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def packed_strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each dimension of a packed box."""
    inner = accumulate(reversed(sizes[1:]), mul, initial=itemsize)
    return tuple(inner)[::-1][: len(sizes)]


def _follows(last: Run, run: Run) -> bool:
    return (
        last.rows == run.rows == 1
        and last.source == run.source
        and last.source_offset + last.row_bytes == run.source_offset
        and last.target_offset + last.row_bytes == run.target_offset
    )


def _start(part: Box, box: Box, strides: Sequence[int]) -> int:
    """Bytes from the start of a box to the first element of a part of it."""
    steps = zip(part.offsets, box.offsets, strides, strict=True)
    return sum([(mine - its) * stride for mine, its, stride in steps])


def _collapse(
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    itemsize: int,
) -> tuple[int, list[_Dim]]:
    """Return the bytes contiguous on both sides, and the loops around, outer first."""
    row_bytes = itemsize
    dims: list[_Dim] = []
    loops = zip(sizes, source_strides, target_strides, strict=True)
    for size, from_source, from_target in reversed(list(loops)):
        if size == 1:
            continue
        if not dims and from_source == from_target == row_bytes:
            row_bytes *= size
        elif dims and (from_source, from_target) == (
            dims[-1].source * dims[-1].size,
            dims[-1].target * dims[-1].size,
        ):
            dims[-1] = dims[-1]._replace(size=dims[-1].size * size)
        else:
            dims.append(_Dim(size, from_source, from_target))
    return row_bytes, dims[::-1]
