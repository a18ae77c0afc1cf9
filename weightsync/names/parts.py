"""Evaluates the value of a rule for one tensor here, into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import PlanError
from weightsync.names.patterns import fill
from weightsync.names.rules import Fused, Source, Stacked
from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.names.rules import Entry, Slice, Value


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a tensor here, and the part of a pushed tensor that it is.

    ``name`` and ``shape`` are those of the pushed tensor and its global shape;
    ``offsets`` say where the region begins in it. ``region`` is a box of the tensor
    here, in its own global coordinates. ``dims`` holds, for each dim of the pushed
    tensor, the dim here, or None for a dim of size 1 that the tensor here lacks.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    region: Box
    dims: tuple[int | None, ...]

    @property
    def box(self) -> Box:
        """The part of the pushed tensor."""
        sizes = self.region.sizes
        return Box(
            self.offsets, tuple([1 if dim is None else sizes[dim] for dim in self.dims])
        )


def identity(name: str, shape: tuple[int, ...]) -> Part:
    """Make the part of a tensor that is the pushed one of the same name."""
    zeros = (0,) * len(shape)
    return Part(name, shape, zeros, Box(zeros, shape), tuple(range(len(shape))))


def parts_of(
    value: Value, shape: tuple[int, ...], bound: Mapping[str, str]
) -> list[Part]:
    """Evaluate a value for a tensor of this global shape.

    Raises PlanError where they do not fit each other.
    """
    if isinstance(value, Stacked):
        return _stacked(value, shape, bound)
    if isinstance(value, Fused):
        return _fused(value, shape, bound)
    return [_source(value, shape, bound)]


def _stacked(
    value: Stacked, shape: tuple[int, ...], bound: Mapping[str, str]
) -> list[Part]:
    if not shape:
        raise PlanError("a tensor without dims holds no stack")
    if value.count not in {None, shape[0]}:
        raise PlanError(
            f"{value.count} of {{{value.over}}} are stacked, not {shape[0]}"
        )
    # Only the names differ from index to index, so the geometry is found once.
    inner = parts_of(value.inner, shape[1:], {**bound, value.over: ""})
    lifted = [
        (source.pushed, part, tuple([None if d is None else d + 1 for d in part.dims]))
        for source, part in zip(value.sources, inner, strict=True)
    ]
    parts: list[Part] = []
    for row in range(shape[0]):
        names = {**bound, value.over: str(value.first + row)}
        for pushed, part, dims in lifted:
            region = Box((row, *part.region.offsets), (1, *part.region.sizes))
            name = fill(pushed, names)
            parts.append(Part(name, part.shape, part.offsets, region, dims))
    return parts


def _fused(
    value: Fused, shape: tuple[int, ...], bound: Mapping[str, str]
) -> list[Part]:
    dim = value.dim
    if dim >= len(shape):
        raise PlanError(f"dim {dim} is out of range")
    lengths = [_length(source, dim) for source in value.sources]
    if sum(lengths) != shape[dim]:
        sizes = " + ".join(map(str, lengths))
        names = ", ".join(repr(source.pushed) for source in value.sources)
        raise PlanError(
            f"dim {dim} has size {shape[dim]}, but what is fused there, {names}, has "
            f"{sizes} = {sum(lengths)}"
        )
    parts: list[Part] = []
    start = 0
    for source, length in zip(value.sources, lengths, strict=True):
        inner = _source(source, (*shape[:dim], length, *shape[dim + 1 :]), bound)
        parts.append(_moved(inner, dim, start))
        start += length
    return parts


def _length(source: Source, dim: int) -> int:
    for part in source.slices:
        if part.dim == dim and part.length is not None:
            return part.length
    raise PlanError(f"{source.pushed!r}: its size in dim {dim} must be given")


def _moved(part: Part, dim: int, start: int) -> Part:
    offsets = part.region.offsets
    region = Box((*offsets[:dim], start, *offsets[dim + 1 :]), part.region.sizes)
    return Part(part.name, part.shape, part.offsets, region, part.dims)


class _Span(NamedTuple):
    """Along one dim of a pushed tensor: its size, and what of it lies here."""

    whole: int
    offset: int
    size: int


def _source(source: Source, shape: tuple[int, ...], bound: Mapping[str, str]) -> Part:
    spans = [_Span(size, 0, size) for size in shape]
    for part in source.slices:
        if part.dim >= len(shape):
            raise PlanError(f"{source.pushed!r}: dim {part.dim} is out of range")
        spans[part.dim] = _span(source.pushed, part, shape[part.dim])
    region = Box((0,) * len(shape), tuple([span.size for span in spans]))
    dims: tuple[int | None, ...] = tuple(range(len(shape)))
    if source.entry is not None:
        spans.insert(0, _entry(source.pushed, source.entry, bound))
        dims = (None, *dims)
    return _part(fill(source.pushed, bound), spans, region, dims)


def _part(
    name: str, spans: Sequence[_Span], region: Box, dims: tuple[int | None, ...]
) -> Part:
    shape = tuple([span.whole for span in spans])
    return Part(name, shape, tuple([span.offset for span in spans]), region, dims)


def _span(pushed: str, part: Slice, here: int) -> _Span:
    length = here if part.length is None else part.length
    size = length * part.count if part.size is None else part.size
    if length != here or length * part.count < size:
        raise PlanError(
            f"{pushed!r}: dim {part.dim} has size {here}, which is not "
            f"slice {part.index} of {part.count} of {size}"
        )
    end = part.start + size
    # A slice that is nothing but padding begins at the end.
    offset = min(part.start + part.index * length, end)
    whole = end if part.whole is None else part.whole
    return _Span(whole, offset, min(length, end - offset))


def _entry(pushed: str, entry: Entry, bound: Mapping[str, str]) -> _Span:
    text = bound[entry.over]
    if not (text.isascii() and text.isdecimal()):
        raise PlanError(f"{{{entry.over}}} is {text!r}, which is no number")
    index = int(text) + entry.first
    if index >= entry.whole:
        raise PlanError(f"{pushed!r}: entry {index} is not among its {entry.whole}")
    return _Span(entry.whole, index, 1)
