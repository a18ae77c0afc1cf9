"""Who holds which pieces of each name: manifests grouped by what their names share.

A model has many names and few ways to cut them. Names of which the same ranks hold the
same pieces form a group, and whatever depends on shapes and boxes is found once for
each group. That makes plans of a million pieces a matter of a second.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import DtypeError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.spec import Box, Kind, Manifest


class Held(NamedTuple):
    """A piece that a rank holds: the ``nth`` that it has of its name."""

    rank: int
    kind: Kind
    nth: int


class Group:
    """Names of which the same ranks hold the same pieces."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self.names: list[str] = []

    @property
    def first(self) -> Held:
        """The piece of the lowest rank."""
        return self.held[0]

    @cached_property
    def holders(self) -> dict[Box, list[Held]]:
        """For each box that is not empty the pieces of it, by copy and rank."""
        holders: dict[Box, list[Held]] = {}
        for held in self.held:
            if not held.kind.box.empty:
                holders.setdefault(held.kind.box, []).append(held)
        for pieces in holders.values():
            pieces.sort(key=_copy_and_rank)
        return holders

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes that are not empty, sorted by their offsets."""
        return tuple(sorted(self.holders, key=_offsets))

    def check_alike(self, role: str) -> None:
        """Check that all ranks agree on global shape and dtype of these names.

        Raises PlanError or DtypeError naming the first name and two ranks.
        """
        for held in self.held:
            check_shapes(self.names[0], self.first, held, (role, role))
            check_dtypes(self.names[0], self.first, held, (role, role))


class Holdings:
    """All names of some manifests, in groups. Manifests are in the order of ranks."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._tables = _tables(manifests)
        self._table_of = {rank: t for t in self._tables for rank in t.ranks}
        self._by_name: dict[str, Group] = {}
        steps, states = _states(self._tables)
        groups: dict[int, Group] = {}
        for name, state in states.items():
            group = groups.get(state)
            if group is None:
                group = groups[state] = Group(_way(steps, state))
            group.names.append(name)
            self._by_name[name] = group
        self.groups = tuple(groups.values())

    def __contains__(self, name: str) -> bool:
        """Whether any rank holds a piece of this name."""
        return name in self._by_name

    def __getitem__(self, name: str) -> Group:
        """The group of a name."""
        return self._by_name[name]

    @property
    def names(self) -> Sequence[str]:
        """All names, in the order in which ranks list them."""
        return list(self._by_name)

    def index(self, held: Held, name: str) -> int:
        """Where the piece of a name is in its rank's manifest."""
        return self._table_of[held.rank].indices[name][held.nth]


class _Table:
    """Names that several ranks list alike; only the kinds differ from rank to rank."""

    def __init__(self, names: Sequence[str], kind_of: Sequence[int]) -> None:
        self.names = names
        self.kind_of = kind_of
        self.ranks: dict[int, Sequence[Kind]] = {}

    @cached_property
    def indices(self) -> dict[str, list[int]]:
        """Where the pieces of each name are."""
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            indices.setdefault(name, []).append(index)
        return indices


def _tables(manifests: Iterable[Manifest]) -> list[_Table]:
    tables: dict[tuple[object, object], _Table] = {}
    for rank, manifest in enumerate(manifests):
        key = manifest.names, manifest.kind_of
        if key not in tables:
            tables[key] = _Table(*key)
        tables[key].ranks[rank] = manifest.kinds
    return list(tables.values())


def check_shapes(name: str, mine: Held, other: Held, roles: tuple[str, str]) -> None:
    """Raise PlanError unless two pieces are of tensors of one global shape."""
    if mine.kind.shape != other.kind.shape:
        raise PlanError(
            f"{name!r}: global shape is {mine.kind.shape} on {roles[0]} rank "
            f"{mine.rank} and {other.kind.shape} on {roles[1]} rank {other.rank}"
        )


def check_dtypes(name: str, mine: Held, other: Held, roles: tuple[str, str]) -> None:
    """Raise DtypeError unless two pieces have the same dtype."""
    if mine.kind.dtype != other.kind.dtype:
        raise DtypeError(
            f"{name!r}: dtype is {mine.kind.dtype} on {roles[0]} rank {mine.rank} and "
            f"{other.kind.dtype} on {roles[1]} rank {other.rank}"
        )


_Step = tuple[int, _Table, int]
"""The state before, and the table and the kind in it that led from it to this one."""


def _states(tables: Sequence[_Table]) -> tuple[list[_Step], dict[str, int]]:
    """Let each name walk from state to state, one step for each piece in a table.

    Names that end in the same state are held alike.
    """
    steps: list[_Step] = []
    states: dict[str, int] = {}
    known: dict[tuple[int, int], int] = {}
    seen = 0
    for table in tables:
        for name, kind in zip(table.names, table.kind_of, strict=True):
            step = states.get(name, -1), seen + kind
            state = known.get(step)
            if state is None:
                state = known[step] = len(steps)
                steps.append((step[0], table, kind))
            states[name] = state
        seen += max(table.kind_of, default=0) + 1
    return steps, states


def _way(steps: Sequence[_Step], state: int) -> list[Held]:
    """The pieces on the way to a state, by rank; those of one are in its own order."""
    way: list[tuple[_Table, int]] = []
    while state >= 0:
        state, table, kind = steps[state]
        way.append((table, kind))
    held: list[Held] = []
    last, nth = None, 0
    for table, kind in reversed(way):
        nth = nth + 1 if table is last else 0
        last = table
        held += [Held(rank, kinds[kind], nth) for rank, kinds in table.ranks.items()]
    return sorted(held, key=_rank_and_nth)


def _rank_and_nth(held: Held) -> tuple[int, int]:
    return held.rank, held.nth


def _copy_and_rank(held: Held) -> tuple[int, int]:
    return held.kind.replica, held.rank


def _offsets(box: Box) -> tuple[int, ...]:
    return box.offsets
