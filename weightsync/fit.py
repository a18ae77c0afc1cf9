"""Whether a push fits a replica: names, shapes, dtypes, boxes; before a byte moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from weightsync.boxes import cover, missing, overlapping
from weightsync.errors import PlanError
from weightsync.holdings import Group, Held, Holdings, check_dtypes, check_shapes
from weightsync.spec import CONVERTIBLE, Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.spec import Manifest

LISTED: Final = 20
"""So many names or boxes are listed in an error; of the others it gives the number."""


class Fit(NamedTuple):
    """What a push to a replica amounts to.

    ``nbytes`` are put in all. ``ties`` are pairs of pushed names that land in one
    memory without being known to share memory at the trainers: the push is wrong unless
    their values are equal.
    """

    nbytes: int
    ties: tuple[tuple[str, str], ...]


def check(
    trainers: Sequence[Manifest],
    replica: Sequence[Manifest],
    *,
    replica_name: str,
    partial: bool = False,
    cast: bool = False,
) -> Fit:
    """Check, before anything moves, that a push fits a replica.

    What counts is what all trainer ranks hold together. ``partial`` allows names of
    the replica to be missing from the push; ``cast`` allows floating point dtypes to
    differ.

    Raises PlanError for an empty push, missing and unexpected names, global shapes
    that differ, ranks that contradict each other, boxes of trainers that overlap
    without being equal, parts of the replica that no trainer holds, and ranks of the
    replica that cut a tensor with gaps or overlaps; DtypeError for dtypes that differ.
    """
    pushed, wanted = Holdings(trainers), Holdings(replica)
    if not pushed.names:
        raise PlanError(f"push to replica {replica_name!r}: no trainer pushes anything")
    unexpected = _unexpected(pushed, wanted, trainers)
    absent = [] if partial else list(_absent(pushed, replica))
    if absent or unexpected:
        raise PlanError(
            f"push to replica {replica_name!r}: "
            f"missing: {_listing(absent)}; unexpected: {_listing(unexpected)}"
        )
    for group in pushed.groups:
        group.check_alike("trainer")
        _check_overlap(group, "trainer rank")
    where = f"replica {replica_name!r} rank"
    for group in wanted.groups:
        group.check_alike(f"replica {replica_name!r}")
        _check_whole(group, where)
    pairs = {(id(pushed[n]), id(wanted[n])): n for n in wanted.names if n in pushed}
    for name in pairs.values():
        _check_pair(name, pushed[name], wanted[name], where, cast=cast)
    return Fit(_nbytes(pushed, replica), _ties(trainers, pushed, replica))


# Names


def _unexpected(
    pushed: Holdings, wanted: Holdings, trainers: Sequence[Manifest]
) -> list[str]:
    """Names that the replica does not have, nor any that they share memory with."""
    return [
        name
        for name in pushed.names
        if name not in wanted
        and not any(
            other in wanted and _share_memory(trainers, name, other)
            for other in _aliases(trainers[_holder(pushed[name])], name)
        )
    ]


def _holder(group: Group) -> int:
    """A rank that holds some element of these names, if there is one."""
    return group.holders[group.boxes[0]][0].rank if group.boxes else group.first.rank


def _aliases(manifest: Manifest, name: str) -> list[str]:
    """Names of pieces that view the same memory as some piece of this name."""
    mine = set(_memory(manifest, name))
    pairs = zip(manifest.roots, manifest.names, strict=True)
    return [other for root, other in pairs if root in mine] if manifest.ties else []


def _absent(pushed: Holdings, replica: Iterable[Manifest]) -> dict[str, None]:
    """Names that are not pushed, nor any that they share memory with; in order."""
    absent: dict[str, None] = {}
    for manifest in replica:
        if all(name in pushed for name in manifest.names):
            continue
        pairs = list(zip(manifest.roots, manifest.names, strict=True))
        filled = {root for root, name in pairs if name in pushed}
        for root, name in pairs:
            if root not in filled:
                absent[name] = None
    return absent


def _listing(items: Sequence[object]) -> str:
    if not items:
        return "none"
    shown = [repr(i) if isinstance(i, str) else str(i) for i in items[:LISTED]]
    rest = len(items) - LISTED
    return f"{', '.join(shown)} and {rest} more" if rest > 0 else ", ".join(shown)


# Boxes


def _check_overlap(group: Group, where: str) -> None:
    pair = overlapping(group.boxes)
    if pair is not None:
        first, second = (group.holders[box][0] for box in pair)
        raise PlanError(
            f"{group.names[0]!r}: box {pair[0]} of {where} {first.rank} and box "
            f"{pair[1]} of {where} {second.rank} overlap without being equal, in "
            f"{pair[0].intersect(pair[1])}"
        )


def _check_whole(group: Group, where: str) -> None:
    """Ranks that cut a tensor between them must hold all of it, each part once.

    Where all of them hold the same part, that is all the replica wants.
    """
    if len(group.boxes) < 2:
        return
    _check_overlap(group, where)
    shape = group.first.kind.shape
    rest = missing(Box.whole(shape), group.boxes)
    if rest:
        raise PlanError(
            f"{group.names[0]!r}: the ranks of {where.removesuffix(' rank')} cut it "
            f"between them, but none holds {_listing(rest)} of global shape {shape}"
        )


def _check_pair(
    name: str, pushed: Group, wanted: Group, where: str, *, cast: bool
) -> None:
    for held in wanted.held:
        _check_kind(name, pushed.first, held, where, cast=cast)
    for box, holders in wanted.holders.items():
        if box in pushed.holders:
            continue
        parts = [part for _, part in cover(pushed.boxes, box)]
        if sum([part.numel for part in parts]) != box.numel:
            raise PlanError(
                f"{name!r}: no trainer holds {_listing(missing(box, parts))} of box "
                f"{box} of {where} {holders[0].rank}"
            )


def _check_kind(
    name: str, pushed: Held, wanted: Held, where: str, *, cast: bool
) -> None:
    roles = "trainer", where.removesuffix(" rank")
    check_shapes(name, pushed, wanted, roles)
    if not (cast and CONVERTIBLE.issuperset((pushed.kind.dtype, wanted.kind.dtype))):
        check_dtypes(name, pushed, wanted, roles)


# What it amounts to


def _nbytes(pushed: Holdings, replica: Iterable[Manifest]) -> int:
    total = 0
    for manifest in replica:
        sizes = [kind.nbytes for kind in manifest.kinds]
        columns = zip(manifest.roots, manifest.names, manifest.kind_of, strict=True)
        filled = {root: sizes[kind] for root, name, kind in columns if name in pushed}
        total += sum(filled.values())
    return total


def _ties(
    trainers: Sequence[Manifest], pushed: Holdings, replica: Iterable[Manifest]
) -> tuple[tuple[str, str], ...]:
    ties: dict[tuple[str, str], None] = {}
    for manifest in replica:
        if not manifest.ties:
            continue
        first: dict[int, str] = {}
        columns = zip(manifest.roots, manifest.names, manifest.kind_of, strict=True)
        for root, name, kind in columns:
            if name not in pushed or manifest.kinds[kind].box.empty:
                continue
            pair = first.setdefault(root, name), name
            if pair[0] != name and not _share_memory(trainers, *pair):
                ties[pair] = None
    return tuple(ties)


def _share_memory(trainers: Iterable[Manifest], first: str, second: str) -> bool:
    """Whether two names are one tensor on every trainer rank that holds either."""
    return all(_memory(rank, first) == _memory(rank, second) for rank in trainers)


def _memory(manifest: Manifest, name: str) -> list[int]:
    """The roots of the pieces of a name that are not empty."""
    columns = zip(manifest.names, manifest.kind_of, manifest.roots, strict=True)
    return [
        root
        for other, kind, root in columns
        if other == name and not manifest.kinds[kind].box.empty
    ]
