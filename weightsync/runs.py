"""How part of one packed box is copied into another: the fewest runs of bytes."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def copy_runs(part: Box, source: Box, target: Box, itemsize: int) -> tuple[Run, ...]:
    """Copy ``part``, which is inside both boxes, from ``source`` to ``target``.

    The runs are of source 0 and of a target that starts at 0. Two of them are never
    contiguous with each other on both sides: such dimensions are merged.
    """
    row_bytes, dims = _collapse(part, source, target, itemsize)
    source_start = _start(part, source, itemsize)
    target_start = _start(part, target, itemsize)
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


def cut(box: Box, count: int) -> Iterator[Box]:
    """Cut a box into at most ``count`` pieces of nearly the same size.

    The first dimension is cut that gives pieces of 8 slices or more, so that they
    differ by an eighth at most; where there is none, the longest one.
    """
    if count == 1 or not box.sizes:
        yield box
        return
    fine = [dim for dim, size in enumerate(box.sizes) if size >= 8 * count]
    dim = fine[0] if fine else box.sizes.index(max(box.sizes))
    size = box.sizes[dim]
    count = min(count, size)
    for piece in range(count):
        start, stop = size * piece // count, size * (piece + 1) // count
        yield Box(
            _replace(box.offsets, dim, box.offsets[dim] + start),
            _replace(box.sizes, dim, stop - start),
        )


def _replace(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _strides(box: Box, itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each dimension of a packed box."""
    inner = accumulate(reversed(box.sizes[1:]), mul, initial=itemsize)
    return tuple(inner)[::-1][: len(box.sizes)]


def _start(part: Box, box: Box, itemsize: int) -> int:
    """Bytes from the start of a packed box to the first element of a part of it."""
    steps = zip(part.offsets, box.offsets, _strides(box, itemsize), strict=False)
    return sum([(mine - its) * stride for mine, its, stride in steps])


def _collapse(
    part: Box, source: Box, target: Box, itemsize: int
) -> tuple[int, list[_Dim]]:
    """Return the bytes contiguous on both sides, and the loops around, outer first."""
    row_bytes = itemsize
    dims: list[_Dim] = []
    strides = zip(
        part.sizes, _strides(source, itemsize), _strides(target, itemsize), strict=False
    )
    for size, from_source, from_target in reversed(list(strides)):
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
