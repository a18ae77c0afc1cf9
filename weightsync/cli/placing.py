"""Places a model on a mesh: a layout and tensors in, the manifests of all ranks out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import PlanError
from weightsync.placements import ShardPlacement, placed
from weightsync.spec import Box, Kind, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.cli.layouts import Assignment, Layout, Rule
    from weightsync.cli.models import ModelTensor

Coordinates = dict[str, int]

_Home = tuple[int, tuple[int, ...]]
"""The index of a rule, and the coordinate of each mesh dim that it assigns."""


class _Like(NamedTuple):
    """What tensors that are placed alike have in common; ``rule`` is an index."""

    rule: int
    dtype: str
    shape: tuple[int, ...]


class _Named(NamedTuple):
    """A tensor of the model: how it is placed, and the numbers in its name."""

    tensor: ModelTensor
    like: _Like
    fields: Mapping[str, int]


class _Held(NamedTuple):
    """What ranks hold that agree in the coordinates that decide about names."""

    names: tuple[str, ...]
    likes: tuple[_Like, ...]
    like_of: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """The manifests, in the order of ranks, and the rules that match no tensor.

    The last dim of the mesh varies fastest in that order.
    """

    manifests: tuple[Manifest, ...]
    unused: tuple[Rule, ...]


def place(layout: Layout, model: Sequence[ModelTensor]) -> Placed:
    """Say what each rank of a layout holds of a model.

    Ranks hold their tensors in the order of the model. Names, kinds and ties are
    shared by ranks where they are equal.

    Raises PlanError for a rule that cuts a tensor along a dim that it does not have,
    or whose sizes do not add up to the numbers that the names have.
    """
    placing = _Placing(layout, model)
    mesh = layout.mesh
    manifests = [
        placing.manifest(dict(zip(mesh, at, strict=True)))
        for at in product(*map(range, mesh.values()))
    ]
    return Placed(tuple(manifests), placing.unused())


class _Placing:
    def __init__(self, layout: Layout, model: Sequence[ModelTensor]) -> None:
        self._layout = layout
        self._named = [_named(layout, tensor) for tensor in model]
        self._homes = self._find_homes()
        self._deciding = _deciding(layout)
        self._held: dict[tuple[int, ...], _Held] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}

    def manifest(self, at: Coordinates) -> Manifest:
        key = tuple([at[name] for name in self._deciding])
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = self._hold(at)
        kinds = [self._kind(like, at) for like in held.likes]
        places = {kind: place_ for place_, kind in enumerate(dict.fromkeys(kinds))}
        kind_of = held.like_of
        if len(places) < len(kinds):
            kind_of = tuple([places[kinds[like]] for like in kind_of])
        return Manifest(tuple(places), held.names, kind_of, held.ties)

    def unused(self) -> tuple[Rule, ...]:
        used = {named.like.rule for named in self._named}
        rules = self._layout.rules[:-1]
        return tuple([rule for index, rule in enumerate(rules) if index not in used])

    def _find_homes(self) -> list[_Home]:
        """For each tensor: its rule, and the coordinates that it is assigned to."""
        counts: dict[str, int] = {}
        for named in self._named:
            for field, number in named.fields.items():
                counts[field] = max(counts.get(field, 0), number + 1)
        owners = {
            (index, each.over): _owners(each, counts[each.field], self._layout, rule)
            for index, rule in enumerate(self._layout.rules)
            for each in rule.assignments
            if each.field in counts
        }
        homes: list[_Home] = []
        for _, like, fields in self._named:
            assigned = self._layout.rules[like.rule].assignments
            at = [owners[like.rule, a.over][fields[a.field]] for a in assigned]
            homes.append((like.rule, tuple(at)))
        return homes

    def _hold(self, at: Coordinates) -> _Held:
        here = {home for home in set(self._homes) if self._is_here(home, at)}
        pairs = zip(self._named, self._homes, strict=True)
        kept = [named for named, home in pairs if home in here]
        likes: dict[_Like, int] = {}
        like_of = [likes.setdefault(named.like, len(likes)) for named in kept]
        names = tuple([named.tensor.name for named in kept])
        return _Held(names, tuple(likes), tuple(like_of), self._ties(kept))

    def _is_here(self, home: _Home, at: Coordinates) -> bool:
        index, assigned = home
        rule = self._layout.rules[index]
        here = all(
            at[each.over] == coordinate
            for each, coordinate in zip(rule.assignments, assigned, strict=True)
        )
        return here and all(at[name] in kept for name, kept in rule.only.items())

    def _ties(self, kept: Sequence[_Named]) -> tuple[tuple[int, int], ...]:
        first: dict[str, int] = {}
        ties: list[tuple[int, int]] = []
        for index, named in enumerate(kept):
            memory = named.tensor.tied or named.tensor.name
            other = first.setdefault(memory, index)
            if other != index and self._alike(named.like, kept[other].like):
                ties.append((index, other))
        return tuple(ties)

    def _alike(self, one: _Like, other: _Like) -> bool:
        """Whether two tensors of one memory have one memory when placed, too."""
        rules = self._layout.rules
        cuts = rules[one.rule].cuts == rules[other.rule].cuts
        return cuts and one[1:] == other[1:]

    def _kind(self, like: _Like, at: Coordinates) -> Kind:
        rule = self._layout.rules[like.rule]
        names = [name for cut in rule.cuts for name in cut.over]
        key = (like, *[at[name] for name in (*names, *rule.copied)])
        if key not in self._kinds:
            box = _box(rule, like.shape, self._layout.mesh, at)
            self._kinds[key] = Kind(like.dtype, like.shape, box, _copy(rule, at))
        return self._kinds[key]


def _deciding(layout: Layout) -> list[str]:
    """The mesh dims on which it depends which names a rank holds."""
    deciding = {each.over for rule in layout.rules for each in rule.assignments}
    deciding.update([name for rule in layout.rules for name in rule.only])
    return [name for name in layout.mesh if name in deciding]


def _named(layout: Layout, tensor: ModelTensor) -> _Named:
    for index, rule in enumerate(layout.rules):
        fields = rule.match(tensor.name)
        if fields is not None:
            for cut in rule.cuts:
                _check_dim(rule, cut.dim, tensor)
            dtype = tensor.dtype if rule.dtype is None else rule.dtype
            return _Named(tensor, _Like(index, dtype, tensor.shape), fields)
    raise PlanError(f"{layout.source}: no rule matches {tensor.name!r}")


def _check_dim(rule: Rule, dim: int, tensor: ModelTensor) -> None:
    dims = len(tensor.shape)
    if not -dims <= dim < dims:
        raise PlanError(
            f"{rule.where}.shard cuts dim {dim}, but {tensor.name!r} of shape "
            f"{tensor.shape} has {dims} dims"
        )


# Placement arithmetic is torch's


def _owners(
    each: Assignment, count: int, layout: Layout, rule: Rule
) -> tuple[int, ...]:
    """For each number from 0 to ``count`` - 1 the coordinate that holds it."""
    size = layout.mesh[each.over]
    if each.sizes is None:
        shares = [_chunk((count,), 0, size, at).sizes[0] for at in range(size)]
    else:
        shares = list(each.sizes)
    if sum(shares) != count:
        raise PlanError(
            f"{rule.where}.assign.{each.over}.sizes is {shares}, in total "
            f"{sum(shares)}, but <{each.field}> has the numbers 0 to {count - 1}"
        )
    return tuple([at for at, share in enumerate(shares) for _ in range(share)])


def _chunk(shape: tuple[int, ...], dim: int, size: int, at: int) -> Box:
    (box,) = placed(shape, (size,), (at,), (ShardPlacement(dim),))
    return box


def _box(
    rule: Rule, shape: tuple[int, ...], mesh: Mapping[str, int], at: Coordinates
) -> Box:
    """Cut by one mesh after the other, in the order of the rule."""
    sizes = tuple([math.prod([mesh[name] for name in cut.over]) for cut in rule.cuts])
    coordinate = tuple(
        [_linear([(at[name], mesh[name]) for name in cut.over]) for cut in rule.cuts]
    )
    shards = tuple([ShardPlacement(cut.dim % len(shape)) for cut in rule.cuts])
    (box,) = placed(shape, sizes, coordinate, shards)
    return box


def _copy(rule: Rule, at: Coordinates) -> int:
    return _linear(
        [
            (allowed.index(at[name]), len(allowed))
            for name, allowed in rule.copied.items()
        ]
    )


def _linear(coordinates: Sequence[tuple[int, int]]) -> int:
    """Number a coordinate (place, size) of a mesh row by row."""
    number = 0
    for place_, size in coordinates:
        number = number * size + place_
    return number
