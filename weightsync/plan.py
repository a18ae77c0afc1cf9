"""Which bytes each trainer rank puts where: manifests in, runs of bytes out; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import combinations, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from weightsync.errors import DtypeError, PlanError
from weightsync.runs import Run, copy_runs, cut
from weightsync.spec import ITEMSIZE, Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Plan", "Run", "SlotLayout", "check", "make_plan", "slot_layout"]

ALIGNMENT: Final = 64
"""Bytes to which the start of each tensor in a slot is aligned."""

SPLIT_BYTES: Final = 1 << 20
"""From this size on, what several trainer ranks hold is cut into a piece for each."""

LISTED_NAMES: Final = 20
"""So many names are listed in an error; of the others it gives the number."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where each tensor of a manifest starts in a slot, and the slot's size, in bytes.

    Each box lies there packed and row-major.
    """

    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of every pair of trainer rank and generator rank.

    ``digest`` is 16 bytes, equal on every process that planned the same. ``ties`` are
    pairs of pushed names that land in one destination storage without being known to
    share memory at the trainers: the push is wrong unless their values are equal.
    """

    ties: tuple[tuple[str, str], ...]
    digest: bytes
    _runs: Mapping[tuple[int, int], tuple[Run, ...]] = field(repr=False)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Each (trainer rank, generator rank) with something to move, in order."""
        return tuple(self._runs)

    def runs(self, trainer: int, generator: int) -> tuple[Run, ...]:
        """Return what a trainer rank puts to a generator rank, by target offset."""
        return self._runs.get((trainer, generator), ())

    def nbytes(self, trainer: int, generator: int) -> int:
        """Return how many bytes a trainer rank puts to a generator rank."""
        return sum([run.nbytes for run in self.runs(trainer, generator)])


def slot_layout(manifest: Manifest) -> SlotLayout:
    """Lay the tensors of a generator rank out in a slot; tied ones share a place."""
    offsets: dict[str, int] = {}
    end = 0
    for tensor in manifest.tensors:
        if tensor.tied is None:
            offsets[tensor.name] = end
            end += tensor.nbytes
            end += -end % ALIGNMENT
        else:
            offsets[tensor.name] = offsets[tensor.tied]
    return SlotLayout(tuple(offsets.values()), end)


def check(
    trainers: Sequence[Manifest],
    replica: Sequence[Manifest],
    *,
    replica_name: str,
    partial: bool = False,
) -> None:
    """Check, before anything moves, that a push fits a replica.

    What counts is what all trainer ranks hold together. ``partial`` allows names of
    the replica to be missing from the push.

    Raises PlanError for an empty push, missing and unexpected names, global shapes
    that differ, trainer ranks that contradict each other, boxes of trainers that
    overlap without being equal, and parts of the replica that no trainer holds;
    DtypeError for dtypes that differ.
    """
    held = _gather(trainers)
    _check_names(held, replica, replica_name, partial)
    for name, source in held.items():
        _check_overlap(name, source)
    for rank, manifest in enumerate(replica):
        where = f"replica {replica_name!r} rank {rank}"
        for tensor in manifest.tensors:
            if tensor.name in held:
                _check_tensor(held[tensor.name], tensor, where)


def make_plan(trainers: Sequence[Manifest], replica: Sequence[Manifest]) -> Plan:
    """Plan how the trainer ranks fill a slot of each generator rank.

    Both are in the order of their ranks and passed ``check``. Every byte that is
    pushed is written once, by one of the ranks that hold it. Names that only one side
    has are left out.
    """
    held = _gather(trainers)
    parts = [
        part
        for rank, manifest in enumerate(replica)
        for part in _parts_of(held, rank, manifest)
    ]
    found = _assign(parts, len(trainers))
    runs = {
        pair: tuple(sorted(found[pair], key=attrgetter("target_offset")))
        for pair in sorted(found)
    }
    manifests = [[m.digest for m in trainers], [m.digest for m in replica]]
    text = msgspec.msgpack.encode((manifests, list(runs.items())))
    digest = blake2b(text, digest_size=16).digest()
    return Plan(_ties(trainers, held, replica), digest, runs)


# What the trainers hold together


@dataclass(slots=True)
class _Source:
    """One name over all trainer ranks: for each box (rank, index in its manifest)."""

    rank: int
    spec: TensorSpec
    holders: dict[Box, list[tuple[int, int]]]

    @property
    def boxes(self) -> tuple[Box, ...]:
        if len(self.holders) < 2:
            return tuple(self.holders)
        return tuple(sorted(self.holders, key=attrgetter("offsets")))


def _gather(trainers: Sequence[Manifest]) -> dict[str, _Source]:
    held: dict[str, _Source] = {}
    for rank, manifest in enumerate(trainers):
        for index, tensor in enumerate(manifest.tensors):
            source = held.get(tensor.name)
            if source is None:
                source = held[tensor.name] = _Source(rank, tensor, {})
            else:
                _check_alike(source, tensor, f"trainer rank {rank}")
            if not tensor.box.empty:
                source.holders.setdefault(tensor.box, []).append((rank, index))
    return held


def _check_alike(source: _Source, tensor: TensorSpec, where: str) -> None:
    pushed = source.spec
    if pushed.shape != tensor.shape:
        raise PlanError(
            f"{tensor.name!r}: global shape is {pushed.shape} on trainer rank "
            f"{source.rank} and {tensor.shape} on {where}"
        )
    if pushed.dtype != tensor.dtype:
        raise DtypeError(
            f"{tensor.name!r}: dtype is {pushed.dtype} on trainer rank {source.rank} "
            f"and {tensor.dtype} on {where}"
        )


# Checks


def _check_names(
    held: Mapping[str, _Source],
    replica: Sequence[Manifest],
    replica_name: str,
    partial: bool,
) -> None:
    if not held:
        raise PlanError(f"push to replica {replica_name!r}: no trainer pushes anything")
    wanted = {name for manifest in replica for name in manifest.names}
    unexpected = [name for name in held if name not in wanted]
    missing = [] if partial else list(_missing(held, replica))
    if missing or unexpected:
        raise PlanError(
            f"push to replica {replica_name!r}: "
            f"missing: {_listing(missing)}; unexpected: {_listing(unexpected)}"
        )


def _missing(
    held: Mapping[str, _Source], replica: Iterable[Manifest]
) -> dict[str, None]:
    """Names that are not pushed, nor any that they share storage with; in order."""
    missing: dict[str, None] = {}
    for manifest in replica:
        if held.keys() >= manifest.by_name.keys():
            continue
        roots = _roots(manifest)
        pushed = {roots[name] for name in manifest.names if name in held}
        missing.update({n: None for n in manifest.names if roots[n] not in pushed})
    return missing


def _listing(names: Sequence[str]) -> str:
    if not names:
        return "none"
    listed = ", ".join(repr(name) for name in names[:LISTED_NAMES])
    rest = len(names) - LISTED_NAMES
    return f"{listed} and {rest} more" if rest > 0 else listed


def _check_overlap(name: str, source: _Source) -> None:
    pair = _overlapping(source.boxes)
    if pair is not None:
        (first, _), (second, _) = (source.holders[box][0] for box in pair)
        raise PlanError(
            f"{name!r}: box {pair[0]} of trainer rank {first} and box {pair[1]} of "
            f"trainer rank {second} overlap without being equal"
        )


@lru_cache(maxsize=1024)
def _overlapping(boxes: tuple[Box, ...]) -> tuple[Box, Box] | None:
    """Find two boxes that overlap; boxes are sorted by their offsets, none is empty.

    Where all are cut along one dimension only, neighbours are enough.
    """
    dims = [
        {(box.offsets[dim], box.sizes[dim]) for box in boxes}
        for dim in range(len(boxes[0].sizes) if boxes else 0)
    ]
    one_cut = sum([len(spans) > 1 for spans in dims]) <= 1
    pairs = pairwise(boxes) if one_cut else combinations(boxes, 2)
    for first, second in pairs:
        if not first.intersect(second).empty:
            return first, second
    return None


def _check_tensor(source: _Source, tensor: TensorSpec, where: str) -> None:
    _check_alike(source, tensor, where)
    if tensor.box in source.holders:
        return
    covered = sum([part.numel for _, part in _cover(source.boxes, tensor.box)])
    if covered != tensor.box.numel:
        raise PlanError(
            f"{tensor.name!r}: the trainers hold {covered} of the "
            f"{tensor.box.numel} elements of box {tensor.box} of {where}"
        )


@lru_cache(maxsize=1024)
def _cover(boxes: tuple[Box, ...], box: Box) -> tuple[tuple[Box, Box], ...]:
    """Return each of the boxes that meets ``box``, with their intersection."""
    parts = [(other, other.intersect(box)) for other in boxes]
    return tuple([(other, part) for other, part in parts if not part.empty])


# Ties


def _roots(manifest: Manifest) -> dict[str, str]:
    """Map each name to the first that views the same memory."""
    roots: dict[str, str] = {}
    for tensor in manifest.tensors:
        roots[tensor.name] = tensor.name if tensor.tied is None else roots[tensor.tied]
    return roots


def _ties(
    trainers: Sequence[Manifest],
    held: Mapping[str, _Source],
    replica: Sequence[Manifest],
) -> tuple[tuple[str, str], ...]:
    ties: dict[tuple[str, str], None] = {}
    for manifest in replica:
        first: dict[str, str] = {}
        for name, root in _roots(manifest).items():
            if name in held and not manifest.by_name[name].box.empty:
                pair = first.setdefault(root, name), name
                if pair[0] != name and not _share_memory(trainers, *pair):
                    ties[pair] = None
    return tuple(ties)


def _share_memory(trainers: Sequence[Manifest], first: str, second: str) -> bool:
    """Whether two names are one tensor on every trainer rank that holds either."""
    return all(_root(rank, first) == _root(rank, second) for rank in trainers)


def _root(manifest: Manifest, name: str) -> str | None:
    """The first name for the same memory; None where there is no element."""
    tensor = manifest.by_name.get(name)
    if tensor is None or tensor.box.empty:
        return None
    return name if tensor.tied is None else _root(manifest, tensor.tied)


# Who sends what


class _Part(NamedTuple):
    """What one generator rank takes from one box of the trainers."""

    generator: int
    target: TensorSpec
    target_offset: int
    source: Box
    part: Box
    holders: Sequence[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return self.part.numel * ITEMSIZE[self.target.dtype]


def _parts_of(
    held: Mapping[str, _Source], generator: int, manifest: Manifest
) -> Iterator[_Part]:
    roots = _roots(manifest)
    done: set[str] = set()
    offsets = slot_layout(manifest).offsets
    for target, offset in zip(manifest.tensors, offsets, strict=True):
        source, root = held.get(target.name), roots[target.name]
        if source is None or root in done or target.box.empty:
            continue
        done.add(root)
        exact = target.box in source.holders
        boxes = (target.box,) if exact else source.boxes
        for box, part in _cover(boxes, target.box):
            yield _Part(generator, target, offset, box, part, source.holders[box])


def _assign(parts: Iterable[_Part], trainers: int) -> dict[tuple[int, int], list[Run]]:
    """Give each part to its holders: those first that leave no choice."""
    load = [0] * trainers
    runs: dict[tuple[int, int], list[Run]] = {}

    def give(part: _Part, holder: tuple[int, int]) -> None:
        rank, index = holder
        load[rank] += part.nbytes
        runs.setdefault((rank, part.generator), []).extend(_runs(part, index))

    small: list[_Part] = []
    for part in parts:
        if len(part.holders) > 1 and part.nbytes < SPLIT_BYTES:
            small.append(part)
            continue
        for holder, piece in zip(
            part.holders, cut(part.part, len(part.holders)), strict=False
        ):
            give(part._replace(part=piece), holder)
    for part in small:
        give(part, min(part.holders, key=lambda holder: load[holder[0]]))
    return runs


def _runs(part: _Part, index: int) -> list[Run]:
    start = part.target_offset
    if part.source == part.part == part.target.box:
        whole = part.nbytes
        return [Run(index, 0, start, 1, whole, whole, whole)]
    itemsize = ITEMSIZE[part.target.dtype]
    runs = copy_runs(part.part, part.source, part.target.box, itemsize)
    return [Run(index, run[1], start + run[2], *run[3:]) for run in runs]
