"""Which pieces of the trainer ranks must have equal bytes, and whether they have; pure.

Names that land in one memory of a generator must be equal wherever they are held, and
copies of one piece must be where a push asks for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import PlanError, ProtocolError
from weightsync.holdings import Holdings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weightsync.spec import Box, Manifest

Tie = tuple[str, str]
"""Two pushed names that land in one memory."""


class Piece(NamedTuple):
    """A piece by trainer rank, index in the manifest of the rank, and name."""

    rank: int
    at: int
    name: str


class Alike(NamedTuple):
    """Pieces of one box whose bytes must be equal."""

    box: Box
    pieces: tuple[Piece, ...]


def must_be_alike(
    trainers: Sequence[Manifest], ties: Iterable[Tie], *, copies: bool
) -> tuple[Alike, ...]:
    """Find what must have equal bytes: tied names, and all copies if that is asked.

    Raises PlanError for tied names that are cut differently.
    """
    return tuple(_Finder(trainers).find(ties, copies=copies))


def to_digest(alike: Iterable[Alike], ranks: int) -> list[tuple[int, ...]]:
    """For each trainer rank the indices of the pieces that it is to digest."""
    found: list[set[int]] = [set() for _ in range(ranks)]
    for _, pieces in alike:
        for piece in pieces:
            found[piece.rank].add(piece.at)
    return [tuple(sorted(indices)) for indices in found]


def compare(alike: Sequence[Alike], digests: Mapping[int, Sequence[bytes]]) -> None:
    """Compare the digests of all trainer ranks, each in the order of ``to_digest``.

    Raises PlanError naming tensor, box, and the ranks on each side, ProtocolError for
    another number of digests than was asked for.
    """
    asked = to_digest(alike, len(digests))
    found: dict[tuple[int, int], bytes] = {}
    for rank, indices in enumerate(asked):
        if len(indices) != len(digests[rank]):
            raise ProtocolError(f"trainer rank {rank} sent another number of digests")
        for index, digest in zip(indices, digests[rank], strict=True):
            found[rank, index] = digest
    for one in alike:
        sides: dict[bytes, list[Piece]] = {}
        for piece in one.pieces:
            sides.setdefault(found[piece.rank, piece.at], []).append(piece)
        if len(sides) > 1:
            raise PlanError(_message(one, list(sides.values())))


class _Finder:
    def __init__(self, trainers: Sequence[Manifest]) -> None:
        self._trainers = trainers
        self._holdings = Holdings(trainers)

    def find(self, ties: Iterable[Tie], *, copies: bool) -> Iterator[Alike]:
        for tie in ties:
            yield from self._tied(tie)
        if copies:
            for group in self._holdings.groups:
                boxes = [box for box, held in group.holders.items() if len(held) > 1]
                for name in group.names if boxes else ():
                    yield from self._of((name,), boxes)

    def _tied(self, tie: Tie) -> Iterator[Alike]:
        boxes = [self._holdings[name].boxes for name in tie]
        if boxes[0] != boxes[1]:
            raise PlanError(
                f"{_shared(tie)}, but the trainer ranks cut them differently, so their "
                "values cannot be compared"
            )
        yield from self._of(tie, boxes[0])

    def _of(self, names: Sequence[str], boxes: Iterable[Box]) -> Iterator[Alike]:
        for box in boxes:
            pieces = dict.fromkeys(self._pieces(names, box))
            if len({(piece.rank, piece.at) for piece in pieces}) > 1:
                yield Alike(box, tuple(pieces))

    def _pieces(self, names: Iterable[str], box: Box) -> Iterator[Piece]:
        """All pieces of a box; those of one memory by the index of the first."""
        for name in names:
            for held in self._holdings[name].holders[box]:
                index = self._holdings.index(held, name)
                yield Piece(held.rank, self._trainers[held.rank].roots[index], name)


def _shared(names: Iterable[str]) -> str:
    return f"{' and '.join(map(repr, names))} share one storage on the generator"


def _message(alike: Alike, sides: Iterable[Iterable[Piece]]) -> str:
    names = list(dict.fromkeys(piece.name for piece in alike.pieces))
    found = " and ".join(_holders(side, named=len(names) > 1) for side in sides)
    what = f"{_shared(names)}, but" if len(names) > 1 else f"{names[0]!r}:"
    return f"{what} box {alike.box} has different values: {found}"


def _holders(pieces: Iterable[Piece], *, named: bool) -> str:
    ranks: dict[str, list[str]] = {}
    for piece in pieces:
        name = f"{piece.name!r} " if named else ""
        ranks.setdefault(name, []).append(str(piece.rank))
    return ", ".join(
        f"{name}on trainer rank{'s' if len(held) > 1 else ''} {', '.join(held)}"
        for name, held in ranks.items()
    )
