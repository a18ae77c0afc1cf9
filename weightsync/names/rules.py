"""Rules: which pushed tensors a tensor here is made of. Plain data.

A rule has a pattern of names here and a value, which is a small expression:

- a ``Source`` is one pushed tensor, or a part of it;
- ``Fused`` are sources side by side along a dim;
- ``Stacked`` is one such value for each index of a new first dim.

Sizes, offsets and dims count elements and dims from 0 up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from weightsync.errors import PlanError
from weightsync.names.patterns import Matcher, placeholders

if TYPE_CHECKING:
    from collections.abc import Sequence, Set


@dataclass(frozen=True, slots=True)
class Slice:
    """Which elements of a pushed tensor lie here along one dim.

    ``dim`` is a dim of the tensor here. Along it the pushed tensor has ``whole``
    elements; the ``size`` of them from ``start`` on are cut into ``count`` equal
    slices, and slice ``index`` is here. Without ``size`` a slice is as long as what is
    here; without ``whole`` the pushed tensor ends with the last slice.

    ``padded`` says that slices are as long as what is here even where together they
    are longer than ``size``: what lies beyond is padding, which keeps its value.
    """

    dim: int
    index: int = 0
    count: int = 1
    start: int = 0
    size: int | None = None
    whole: int | None = None
    padded: bool = False

    @property
    def length(self) -> int | None:
        """Elements of one slice, or None where what is here decides."""
        if self.size is None or self.padded:
            return None
        return self.size // self.count


@dataclass(frozen=True, slots=True)
class Entry:
    """One index of the first dim of a pushed tensor, which is no dim here.

    ``over`` is the placeholder that holds the index here; ``first`` is added to it.
    ``whole`` is the number of entries of the pushed tensor.
    """

    over: str
    whole: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A pushed tensor, by a pattern of its name, or the part that its slices say."""

    pushed: str
    slices: tuple[Slice, ...] = ()
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Sources side by side along ``dim``; a slice of each must tell its size there."""

    sources: tuple[Source, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stacked:
    """One value for each index of the first dim of the tensor here.

    The placeholder ``over`` takes the numbers from ``first`` on. Dims inside are
    counted without the first. ``count``, where given, must be the size of that dim.
    """

    inner: Source | Fused
    over: str
    first: int = 0
    count: int | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of each index."""
        return sources_of(self.inner)


Value: TypeAlias = Source | Fused | Stacked


def sources_of(value: Value) -> tuple[Source, ...]:
    """Return the sources of a value, in order."""
    return (value,) if isinstance(value, Source) else value.sources


@dataclass(frozen=True, slots=True)
class Rule:
    """Says what every tensor here is whose name matches the pattern ``here``.

    An ``optional`` rule may match nothing. What a ``shared`` rule takes from a pushed
    tensor, other tensors here may take too.

    Raises PlanError for a value that can fit no tensor.
    """

    here: str
    value: Value
    optional: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        fault = _pattern_fault(self) or _value_fault(self.value)
        if fault is not None:
            raise PlanError(f"rule {self.here!r}: {fault}")


def take(pushed: str, *slices: Slice, entry: Entry | None = None) -> Source:
    """Make a source of a pushed tensor: all of it, or the part that the slices say."""
    return Source(pushed, slices, entry)


def rename(here: str, pushed: str) -> Rule:
    """Make the rule that a tensor here is the pushed one of another name."""
    return Rule(here, Source(pushed))


def cut(
    here: str,
    pushed: str | None = None,
    *,
    dim: int,
    index: int,
    count: int,
    size: int | None = None,
) -> Rule:
    """Make the rule that a tensor here is slice ``index`` of ``count`` of a pushed one.

    It is for plain tensors that an engine cut by hand. ``pushed`` is the same name by
    default. ``size`` is the size of the pushed tensor along ``dim``, needed where the
    engine pads it to a multiple of something: the padding keeps its value.
    """
    part = Slice(dim, index, count, size=size, padded=size is not None)
    return Rule(here, Source(here if pushed is None else pushed, (part,)))


def fuse(here: str, sources: Sequence[Source], *, dim: int = 0) -> Rule:
    """Make the rule that a tensor here is several sources side by side."""
    return Rule(here, Fused(tuple(sources), dim))


def stack(
    here: str,
    inner: Source | Fused,
    *,
    over: str,
    first: int = 0,
    count: int | None = None,
) -> Rule:
    """Make the rule that index ``i`` of a tensor here is the value for ``first + i``.

    ``over`` is the placeholder in the patterns of ``inner`` that takes the number.
    """
    return Rule(here, Stacked(inner, over, first, count))


def optional(rule: Rule) -> Rule:
    """Let a rule match nothing, for example on ranks that lack a layer."""
    return replace(rule, optional=True)


def shared(rule: Rule) -> Rule:
    """Let a rule take what another tensor here takes as well, as tied weights do."""
    return replace(rule, shared=True)


def _pattern_fault(rule: Rule) -> str | None:
    Matcher(rule.here)
    value, bound = rule.value, placeholders(rule.here)
    if isinstance(value, Stacked):
        if value.over in bound:
            return f"{{{value.over}}} is stacked, so it cannot be in the name here"
        bound |= {value.over}
    for source in sources_of(value):
        needed = placeholders(source.pushed)
        if source.entry is not None:
            needed |= {source.entry.over}
        if not needed <= bound:
            missing = ", ".join(f"{{{name}}}" for name in sorted(needed - bound))
            return f"{source.pushed!r} needs {missing}, which nothing stands for"
    return None


def _value_fault(value: Value) -> str | None:
    if isinstance(value, Stacked):
        if value.first < 0:
            return f"the first of {{{value.over}}} cannot be {value.first}"
        return _value_fault(value.inner)
    if isinstance(value, Fused) and not value.sources:
        return "nothing is fused"
    for source in sources_of(value):
        fault = _source_fault(source)
        if fault is None and isinstance(value, Fused):
            fault = _fused_fault(source, value.dim)
        if fault is not None:
            return f"{source.pushed!r}: {fault}"
    return None


def _fused_fault(source: Source, dim: int) -> str | None:
    sized = {part.dim for part in source.slices if part.length is not None}
    return None if dim in sized else f"its size in dim {dim} must be given"


def _source_fault(source: Source) -> str | None:
    seen: set[int] = set()
    for part in source.slices:
        fault = _slice_fault(part, seen)
        if fault is not None:
            return f"dim {part.dim}: {fault}"
        seen.add(part.dim)
    entry = source.entry
    if entry is not None and (entry.whole < 1 or entry.first < 0):
        return f"entries from {entry.first} on of {entry.whole} are none"
    return None


def _slice_fault(part: Slice, seen: Set[int]) -> str | None:
    if part.dim < 0 or part.dim in seen:
        return "is cut twice" if part.dim in seen else "dims are counted from 0 up"
    if not 0 <= part.index < part.count:
        return f"there is no slice {part.index} of {part.count}"
    return _size_fault(part)


def _size_fault(part: Slice) -> str | None:
    if part.size is None:
        if part.start or part.whole is not None or part.padded:
            return "start, whole and padded need a size"
        return None
    whole = part.start + part.size if part.whole is None else part.whole
    if part.start < 0 or part.size < 0 or part.start + part.size > whole:
        return f"{part.start}:{part.start + part.size} is not inside size {whole}"
    if part.size % part.count and not part.padded:
        return f"size {part.size} cannot be cut into {part.count} equal slices"
    return None
