"""Cuts of the dims of a tensor: stretches along each dim, and the boxes they make."""

from __future__ import annotations

from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LocalBox(NamedTuple):
    """A box of a tensor, and where it begins in the local tensor of its rank."""

    box: Box
    start: tuple[int, ...]


class Stretch(NamedTuple):
    """Elements along one dim, without a gap: where they begin and how many they are."""

    start: int
    size: int


def whole(shape: tuple[int, ...]) -> tuple[LocalBox, ...]:
    """Return all of a tensor, as one box."""
    return (LocalBox(Box.whole(shape), (0,) * len(shape)),)


def part(stretches: Iterable[Stretch], start: int, size: int) -> list[Stretch]:
    """Return ``size`` of their elements, from the ``start``-th on."""
    found: list[Stretch] = []
    for stretch in stretches:
        first, last = max(start, 0), min(start + size, stretch.size)
        if first < last:
            found.append(Stretch(stretch.start + first, last - first))
        start -= stretch.size
    return found


def chosen(stretches: Sequence[Stretch], indices: Sequence[int]) -> list[Stretch]:
    """Return their elements of these numbers, in this order."""
    breaks = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
    ends = zip([0, *breaks], [*breaks, len(indices)], strict=True)
    runs = [(indices[first], end - first) for first, end in ends if first < end]
    return _joined([found for run in runs for found in part(stretches, *run)])


def boxes(
    shape: tuple[int, ...], dims: Sequence[Sequence[Stretch]]
) -> tuple[LocalBox, ...]:
    """Combine the stretches of all dims, as they lie in the local tensor.

    Where a dim has none it is one empty box, at the end of that dim.
    """
    located: list[list[tuple[Stretch, int]]] = []
    for size, stretches in zip(shape, dims, strict=True):
        some = stretches or [Stretch(size, 0)]
        starts = accumulate([stretch.size for stretch in some[:-1]], initial=0)
        located.append(list(zip(some, starts, strict=True)))
    return tuple([_box(combination) for combination in product(*located)])


def _box(combination: Sequence[tuple[Stretch, int]]) -> LocalBox:
    offsets = tuple([stretch.start for stretch, _ in combination])
    sizes = tuple([stretch.size for stretch, _ in combination])
    return LocalBox(Box(offsets, sizes), tuple([start for _, start in combination]))


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    joined: list[Stretch] = []
    for stretch in stretches:
        last = joined[-1] if joined else None
        if last is not None and last.start + last.size == stretch.start:
            joined[-1] = Stretch(last.start, last.size + stretch.size)
        else:
            joined.append(stretch)
    return joined
