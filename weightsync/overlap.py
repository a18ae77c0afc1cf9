"""Whether tensors share memory, element by element."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in elements; 0 where a dimension has one element or none."""
    steps = tensor.stride()
    if 1 not in tensor.shape and 0 not in tensor.shape:
        return steps
    pairs = zip(tensor.shape, steps, strict=True)
    return tuple([stride if size > 1 else 0 for size, stride in pairs])


def check_overlap(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that no element of the labelled tensors shares memory with another.

    Where the extents of two tensors meet their elements are compared, so interleaved
    slices of one buffer pass. For that a flag is kept for every unit of memory; units
    are as long as what is contiguous permits, and one element at the least.

    Raises PlanError naming the tensor, or both.
    """
    extents = [_extent(label, tensor) for label, tensor in tensors if tensor.numel()]
    for extent in extents:
        if not extent.tensor.is_contiguous() and _overlaps_itself(extent):
            raise PlanError(f"{extent.label}: its elements share memory")
    extents.sort(key=_start)
    cluster: list[_Extent] = []
    stop = 0
    for extent in extents:
        if extent.start >= stop:
            _check_cluster(cluster)
            cluster = []
        cluster.append(extent)
        stop = max(stop, extent.stop)
    _check_cluster(cluster)


class _Extent(NamedTuple):
    """The bytes from a tensor's first to its last element: ``start <= byte < stop``."""

    start: int
    stop: int
    label: str
    tensor: torch.Tensor


def _start(extent: _Extent) -> int:
    return extent.start


def _extent(label: str, tensor: torch.Tensor) -> _Extent:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return _Extent(start, start + tensor.nbytes, label, tensor)
    steps = zip(tensor.shape, strides(tensor), strict=True)
    last = sum([(size - 1) * stride for size, stride in steps])
    return _Extent(start, start + (last + 1) * tensor.itemsize, label, tensor)


def _check_cluster(cluster: Sequence[_Extent]) -> None:
    if len(cluster) < 2:
        return
    memory = _Memory(cluster)
    for index, extent in enumerate(cluster):
        if memory.claim(extent):
            continue
        for other in cluster[:index]:
            pair = _Memory([other, extent])
            if not (pair.claim(other) and pair.claim(extent)):
                raise PlanError(
                    f"{other.label} and {extent.label} share part of their memory"
                )


class Loops(NamedTuple):
    """A tensor as (times, bytes of a step) around contiguous bytes; inner first."""

    contiguous: int
    loops: list[tuple[int, int]]


def loops_of(tensor: torch.Tensor) -> Loops:
    """Return how the elements of a tensor, which has some, lie in memory."""
    contiguous = tensor.itemsize
    loops: list[tuple[int, int]] = []
    steps = zip(strides(tensor), tensor.shape, strict=True)
    for stride, size in sorted([step for step in steps if step[1] > 1]):
        step = stride * tensor.itemsize
        if step == contiguous and not loops:
            contiguous *= size
        else:
            loops.append((size, step))
    return Loops(contiguous, loops)


def _overlaps_itself(extent: _Extent) -> bool:
    reach, loops = loops_of(extent.tensor)
    if any(step == 0 for _, step in loops):
        return True
    for size, step in loops:
        if step < reach:
            memory = _Memory([extent])
            memory.claim(extent)
            return memory.claimed < extent.tensor.nbytes
        reach += (size - 1) * step
    return False


class _Memory:
    """A flag for each unit of memory that says whether it is claimed.

    The unit is the longest that every start, step and contiguous stretch of the
    tensors is a multiple of.
    """

    def __init__(self, extents: Sequence[_Extent]) -> None:
        self._start = min([extent.start for extent in extents])
        stop = max([extent.stop for extent in extents])
        lengths = [extent.start - self._start for extent in extents]
        for extent in extents:
            contiguous, loops = loops_of(extent.tensor)
            lengths += [contiguous, *(step for _, step in loops)]
        self._unit = math.gcd(*lengths)
        units = (stop - self._start) // self._unit
        self._flags = torch.zeros(units, dtype=torch.bool, device="cpu")

    @property
    def claimed(self) -> int:
        """Bytes that are claimed."""
        return int(self._flags.count_nonzero()) * self._unit

    def claim(self, extent: _Extent) -> bool:
        """Claim the memory of a tensor; False if some of it was claimed before."""
        contiguous, loops = loops_of(extent.tensor)
        flags = self._flags.as_strided(
            (*(size for size, _ in loops), contiguous // self._unit),
            (*(step // self._unit for _, step in loops), 1),
            (extent.start - self._start) // self._unit,
        )
        free = not bool(flags.any())
        flags.fill_(True)
        return free
