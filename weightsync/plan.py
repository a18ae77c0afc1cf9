"""Which bytes each trainer rank puts where: manifests in, runs of bytes out; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from weightsync.boxes import cover
from weightsync.runs import Run, copy_runs, in_pieces, merged
from weightsync.sources import Sources, sender
from weightsync.spec import ITEMSIZE, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weightsync.holdings import Group, Held
    from weightsync.spec import Box

__all__ = [
    "Cast",
    "Plan",
    "Run",
    "SlotLayout",
    "column_plans",
    "make_plan",
    "sent_bytes",
    "slot_layout",
    "sum_of_digests",
]

ALIGNMENT: Final = 64
"""Bytes to which the start of each piece or storage in a slot is aligned."""

CAST_BYTES: Final = 4 << 20
"""The most that one cast converts, in bytes of the destination's dtype."""

_DIGESTS: Final = 1 << 128

Pair = tuple[int, int]
"""Trainer rank and generator rank."""

PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where each piece of a manifest starts in a slot, and the slot's size, in bytes.

    Where the manifest says where the pieces lie in the storages of its rank, a slot
    mirrors these storages, one after the other, and ``storages`` is where each starts;
    else each box lies there packed.
    """

    offsets: tuple[int, ...]
    nbytes: int
    storages: tuple[int, ...] = ()


class Cast(NamedTuple):
    """A run of a source that is converted to ``dtype`` first.

    Offsets and strides count bytes of the converted source, packed.
    """

    dtype: str
    run: Run


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs and casts of pairs of trainer rank and generator rank.

    ``digests`` has for each pair 16 bytes that depend on all of its runs and on the
    manifests of both.
    """

    digests: Mapping[Pair, bytes]
    _runs: Mapping[Pair, tuple[Run, ...]] = field(repr=False)
    _casts: Mapping[Pair, tuple[Cast, ...]] = field(repr=False)

    @property
    def digest(self) -> bytes:
        """16 bytes: the sum of the digests of all pairs. See ``sum_of_digests``."""
        return sum_of_digests(self.digests.values())

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Each (trainer rank, generator rank) with something to move, in order."""
        return tuple(self.digests)

    def runs(self, trainer: int, generator: int) -> tuple[Run, ...]:
        """Return what is put as it is, by target offset."""
        return self._runs.get((trainer, generator), ())

    def casts(self, trainer: int, generator: int) -> tuple[Cast, ...]:
        """Return what is converted and put, by target offset."""
        return self._casts.get((trainer, generator), ())

    def rows(self, trainer: int, generator: int) -> int:
        """Return how many rows a trainer rank puts to a generator rank."""
        return sum([run.rows for run in self._all(trainer, generator)])

    def nbytes(self, trainer: int, generator: int) -> int:
        """Return how many bytes a trainer rank puts to a generator rank."""
        return sum([run.nbytes for run in self._all(trainer, generator)])

    def _all(self, trainer: int, generator: int) -> list[Run]:
        casts = [cast.run for cast in self.casts(trainer, generator)]
        return [*self.runs(trainer, generator), *casts]


def slot_layout(manifest: Manifest) -> SlotLayout:
    """Lay the pieces of a generator rank out in a slot; tied ones share a place."""
    if manifest.places:
        return _mirrored(manifest)
    sizes = [_aligned(kind.nbytes) for kind in manifest.kinds]
    ties = dict(manifest.ties)
    offsets: list[int] = []
    end = 0
    for index, kind in enumerate(manifest.kind_of):
        if index in ties:
            offsets.append(offsets[ties[index]])
        else:
            offsets.append(end)
            end += sizes[kind]
    return SlotLayout(tuple(offsets), end)


def make_plan(
    trainers: Sequence[Manifest],
    replica: Sequence[Manifest],
    *,
    trainer: int | None = None,
    generator: int | None = None,
) -> Plan:
    """Plan how the trainer ranks fill a slot of each generator rank.

    Both are in the order of their ranks and passed ``check``. Every byte that is
    pushed is written once, by one of the ranks that hold it. Names that only one side
    has are left out. Where a trainer rank or a generator rank is given, only its pairs
    are planned.
    """
    generators = range(len(replica)) if generator is None else (generator,)
    return _Planner(trainers, replica, trainer).plan(generators)


def column_plans(
    trainers: Sequence[Manifest], replica: Sequence[Manifest]
) -> Iterator[Plan]:
    """Make the plan of each generator rank, one after the other.

    All together are the whole plan, which may be too large to have at once.
    """
    planner = _Planner(trainers, replica)
    for generator in range(len(replica)):
        yield planner.plan((generator,))


def sent_bytes(trainers: Sequence[Manifest], replica: Sequence[Manifest]) -> list[int]:
    """Return how many bytes each trainer rank puts to a replica, without a plan."""
    return _Planner(trainers, replica).sent_bytes(len(trainers))


def sum_of_digests(digests: Iterable[bytes]) -> bytes:
    """Add digests of 16 bytes up, modulo 2**128.

    The plans of all trainer ranks together have each pair once, and so have those of
    all generator ranks: the sums are equal unless somebody plans something else.
    """
    total = sum([int.from_bytes(digest, "big") for digest in digests])
    return (total % _DIGESTS).to_bytes(16, "big")


# Slots


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _mirrored(manifest: Manifest) -> SlotLayout:
    sizes = [_aligned(nbytes) for nbytes in manifest.storages]
    starts = list(accumulate(sizes, initial=0))
    offsets = [starts[place.storage] + place.offset for place in manifest.places]
    return SlotLayout(tuple(offsets), starts[-1], tuple(starts[:-1]))


# Plans


class _Target(NamedTuple):
    """What a generator rank wants: a box, packed or with these strides."""

    dtype: str
    box: Box
    strides: tuple[int, ...] | None


class _Sent(NamedTuple):
    """What is sent of a held piece to a target: runs of source 0 and target 0."""

    held: Held
    runs: tuple[Run, ...]
    nbytes: int


class _Piece(NamedTuple):
    """A piece that a generator rank wants, and what is sent of it by whom."""

    name: str
    offset: int
    target: _Target
    group: Group
    copy: int


class _Planner:
    """Makes plans from manifests; what a group of names has in common is found once.

    ``trainer`` is the only trainer rank that is planned for, or None.
    """

    def __init__(
        self,
        trainers: Sequence[Manifest],
        replica: Sequence[Manifest],
        trainer: int | None = None,
    ) -> None:
        self._trainers = trainers
        self._replica = replica
        self._trainer = trainer
        self._sources = Sources(trainers)
        self._boxes: dict[tuple[int, int], Sequence[Box]] = {}
        self._known: dict[tuple[int, int, _Target], dict[int, list[_Sent]]] = {}

    def plan(self, generators: Iterable[int]) -> Plan:
        runs: dict[Pair, tuple[Run, ...]] = {}
        casts: dict[Pair, tuple[Cast, ...]] = {}
        for generator in generators:
            for pair, parts in self._column(generator).items():
                runs[pair], casts[pair] = parts.sorted()
        digests = {
            pair: self._digest(pair, runs[pair], casts[pair]) for pair in sorted(runs)
        }
        return Plan(digests, _filled(runs), _filled(casts))

    def sent_bytes(self, ranks: int) -> list[int]:
        counts: dict[tuple[int, int, _Target], tuple[_Piece, int]] = {}
        for rank in range(len(self._replica)):
            for piece in self._pieces(rank):
                key = id(piece.group), piece.copy, piece.target
                counts[key] = piece, counts.get(key, (piece, 0))[1] + 1
        total = [0] * ranks
        for piece, count in counts.values():
            for rank, sent in self._sent(piece).items():
                total[rank] += count * sum([part.nbytes for part in sent])
        return total

    def _column(self, generator: int) -> dict[Pair, _Parts]:
        """Everything that goes to a generator rank."""
        parts: dict[Pair, _Parts] = {}
        index = self._sources.holdings.index
        for piece in self._pieces(generator):
            for rank, sent in self._sent(piece).items():
                found = parts.setdefault((rank, generator), _Parts())
                for held, runs, _ in sent:
                    at = index(held, piece.name)
                    moved = [
                        Run(at, run[1], piece.offset + run[2], *run[3:]) for run in runs
                    ]
                    found.add(moved, held.kind.dtype, piece.target.dtype)
        return parts

    def _pieces(self, generator: int) -> Iterator[_Piece]:
        """What a generator rank wants and trainers hold, each memory once."""
        manifest = self._replica[generator]
        targets = [_Target(kind.dtype, kind.box, None) for kind in manifest.kinds]
        offsets = slot_layout(manifest).offsets
        holdings = self._sources.holdings
        only = self._trainer
        sent = holdings if only is None else set(self._trainers[only].names)
        filled: set[int] = set()
        for index, name in enumerate(manifest.names):
            if manifest.ties and name in holdings:
                if manifest.roots[index] in filled:
                    continue
                filled.add(manifest.roots[index])
            target = targets[manifest.kind_of[index]]
            if name not in sent or target.box.empty:
                continue
            if manifest.places:
                target = target._replace(strides=manifest.places[index].strides)
            copy = self._sources.copy(name)
            yield _Piece(name, offsets[index], target, holdings[name], copy)

    def _sent(self, piece: _Piece) -> dict[int, list[_Sent]]:
        """What each trainer rank sends of a piece."""
        key = id(piece.group), piece.copy, piece.target
        if key not in self._known:
            sent: dict[int, list[_Sent]] = {}
            boxes = self._sent_boxes(piece.group, piece.copy)
            for part in _parts(piece.group, piece.copy, piece.target, boxes):
                sent.setdefault(part.held.rank, []).append(part)
            self._known[key] = sent
        return self._known[key]

    def _sent_boxes(self, group: Group, copy: int) -> Sequence[Box]:
        """The boxes of a group that are sent by whom is planned for."""
        if self._trainer is None:
            return group.boxes
        key = id(group), copy
        if key not in self._boxes:
            self._boxes[key] = [
                box
                for box in group.boxes
                if sender(group, box, copy).rank == self._trainer
            ]
        return self._boxes[key]

    def _digest(
        self, pair: Pair, runs: tuple[Run, ...], casts: tuple[Cast, ...]
    ) -> bytes:
        manifests = self._trainers[pair[0]].digest, self._replica[pair[1]].digest
        text = msgspec.msgpack.encode((manifests, pair, runs, casts))
        return blake2b(text, digest_size=16).digest()


class _Parts:
    """Runs and casts of one pair, being gathered."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._casts: list[Cast] = []

    def add(self, runs: list[Run], source: str, target: str) -> None:
        """Add runs from a piece of one dtype to one of another."""
        if source == target:
            self._runs += runs
        else:
            for run in runs:
                pieces = in_pieces(run, CAST_BYTES)
                self._casts += [Cast(target, piece) for piece in pieces]

    def sorted(self) -> tuple[tuple[Run, ...], tuple[Cast, ...]]:
        """All of them by target offset, joined where that is possible."""
        runs = merged(sorted(self._runs, key=attrgetter("target_offset")))
        casts = sorted(self._casts, key=attrgetter("run.target_offset"))
        return tuple(runs), tuple(casts)


def _parts(
    group: Group, copy: int, target: _Target, boxes: Sequence[Box]
) -> Iterator[_Sent]:
    """What is sent of each of these boxes of a group that meets a target."""
    itemsize = ITEMSIZE[target.dtype]
    for box, part in cover(boxes, target.box):
        held = sender(group, box, copy)
        runs = copy_runs(part, box, target.box, itemsize, target.strides)
        yield _Sent(held, runs, part.numel * itemsize)


def _filled(found: dict[Pair, tuple[PartT, ...]]) -> dict[Pair, tuple[PartT, ...]]:
    return {pair: parts for pair, parts in found.items() if parts}
