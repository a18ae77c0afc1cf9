"""Applies rules to all names of a rank, and checks what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import PlanError
from weightsync.names.parts import identity, parts_of
from weightsync.names.patterns import Matcher
from weightsync.names.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightsync.names.parts import Part
    from weightsync.spec import Box


def translate(
    rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Part, ...]]:
    """Say which pushed tensors every tensor here is made of.

    ``shapes`` maps each canonical name here to its global shape. For each name the
    first rule that matches decides; a name that no rule matches is the pushed tensor
    of the same name. What a rule says is not translated again. A part may be empty,
    where all that a rank holds of a tensor is padding.

    Raises PlanError for a rule that matches no name and is not optional, for one that
    does not fit a shape, and for tensors here that disagree about the shape of a
    pushed tensor or take the same elements of it without a shared rule.
    """
    matchers = _matchers(rules)
    used: set[int] = set()
    claims = _Claims()
    translated: dict[str, tuple[Part, ...]] = {}
    for name, shape in shapes.items():
        index, parts = _translate_one(matchers, name, shape)
        translated[name] = parts
        shared = False
        if index is not None:
            used.add(index)
            shared = matchers[index][1].shared
        claims.add(name, parts, shared=shared)
    _check_used(rules, used)
    claims.check()
    return translated


def _matchers(rules: Sequence[Rule]) -> list[tuple[Matcher, Rule]]:
    for rule in rules:
        if not isinstance(rule, Rule):
            raise PlanError(f"names takes rules, not {type(rule).__name__} {rule!r}")
    return [(Matcher(rule.here), rule) for rule in rules]


def _translate_one(
    matchers: Sequence[tuple[Matcher, Rule]], name: str, shape: tuple[int, ...]
) -> tuple[int | None, tuple[Part, ...]]:
    for index, (matcher, rule) in enumerate(matchers):
        bound = matcher.match(name)
        if bound is None:
            continue
        try:
            return index, tuple(parts_of(rule.value, shape, bound))
        except PlanError as error:
            raise PlanError(
                f"rule {rule.here!r}: tensor {name!r} of shape {shape}: {error}"
            ) from None
    return None, (identity(name, shape),)


def _check_used(rules: Sequence[Rule], used: set[int]) -> None:
    unused = [
        repr(rule.here)
        for index, rule in enumerate(rules)
        if index not in used and not rule.optional
    ]
    if unused:
        raise PlanError(
            f"rules that decide for no tensor here: {', '.join(unused)}; a rule that "
            f"may match nothing must be optional"
        )


class _Claim(NamedTuple):
    """What one tensor here takes of a pushed one."""

    here: str
    part: Part
    box: Box


class _Claims:
    """What is taken of each pushed tensor; most are taken once, by one tensor here."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, Part, bool]] = {}
        self._more: dict[str, list[tuple[str, Part, bool]]] = {}

    def add(self, here: str, parts: Iterable[Part], *, shared: bool) -> None:
        for part in parts:
            claim = (here, part, shared)
            first = self._first.setdefault(part.name, claim)
            if first is not claim:
                self._more.setdefault(part.name, [first]).append(claim)

    def check(self) -> None:
        for pushed, claims in self._more.items():
            _check_shapes(pushed, claims)
            _check_disjoint(
                pushed,
                [
                    _Claim(here, part, part.box)
                    for here, part, shared in claims
                    if not shared and not part.region.empty
                ],
            )


def _check_shapes(pushed: str, claims: Iterable[tuple[str, Part, bool]]) -> None:
    shapes: dict[tuple[int, ...], str] = {}
    for here, part, _ in claims:
        shapes.setdefault(part.shape, here)
    if len(shapes) > 1:
        found = ", ".join(f"{shape} by {here!r}" for shape, here in shapes.items())
        raise PlanError(
            f"pushed tensor {pushed!r} has different global shapes for the tensors "
            f"that are made of it: {found}"
        )


def _check_disjoint(pushed: str, claims: list[_Claim]) -> None:
    pair = _overlapping(claims)
    if pair is not None:
        one, other = pair
        raise PlanError(
            f"{one.here!r} and {other.here!r} take the same elements of pushed tensor "
            f"{pushed!r}, {one.box} and {other.box}; where that is meant, as for tied "
            f"weights, the rule of one of them must be shared"
        )


def _overlapping(claims: list[_Claim]) -> tuple[_Claim, _Claim] | None:
    """Sweep along the dim that separates most; all boxes have the same rank."""
    if len(claims) < 2:
        return None
    if not claims[0].box.sizes:
        return claims[0], claims[1]
    columns = list(zip(*[claim.box.offsets for claim in claims], strict=True))
    starts = [len(set(column)) for column in columns]
    dim = starts.index(max(starts))
    order = sorted(range(len(claims)), key=columns[dim].__getitem__)
    active: list[_Claim] = []
    for claim in [claims[index] for index in order]:
        start = claim.box.offsets[dim]
        active = [a for a in active if a.box.offsets[dim] + a.box.sizes[dim] > start]
        for other in active:
            if not claim.box.intersect(other.box).empty:
                return other, claim
        active.append(claim)
    return None
