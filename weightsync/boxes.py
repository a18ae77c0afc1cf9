"""Arithmetic of boxes of one tensor: which meet, which overlap, what they leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def cover(boxes: Sequence[Box], box: Box) -> list[tuple[Box, Box]]:
    """Return each of the boxes that meets ``box``, with their intersection."""
    parts = [(other, other.intersect(box)) for other in boxes]
    return [(other, part) for other, part in parts if not part.empty]


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two of these different boxes that overlap; none of them is empty."""
    dim = _most_cut(boxes)
    if dim is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        start = box.offsets[dim]
        open_boxes = [b for b in open_boxes if b.offsets[dim] + b.sizes[dim] > start]
        for other in open_boxes:
            if not other.intersect(box).empty:
                return other, box
        open_boxes.append(box)
    return None


def missing(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return what is left of ``box`` without the others, in boxes."""
    left = [box]
    for other in boxes:
        left = [rest for part in left for rest in _without(part, other)]
    return left


def _most_cut(boxes: Sequence[Box]) -> int | None:
    """The dimension in which there are the most different spans."""
    if not boxes or not boxes[0].sizes:
        return None
    spans = [
        len({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        for dim in range(len(boxes[0].sizes))
    ]
    return spans.index(max(spans))


def _without(box: Box, other: Box) -> list[Box]:
    """A box without what it has in common with another: slabs around that."""
    common = box.intersect(other)
    if common.empty:
        return [box]
    slabs: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before = start - offsets[dim]
        after = offsets[dim] + sizes[dim] - start - size
        for at, length in ((offsets[dim], before), (start + size, after)):
            if length:
                slab = (*offsets[:dim], at, *offsets[dim + 1 :])
                lengths = (*sizes[:dim], length, *sizes[dim + 1 :])
                slabs.append(Box(slab, lengths))
        offsets[dim], sizes[dim] = start, size
    return slabs
