"""What a stretch of memory has beside strided pieces, in rows of bytes; pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Strided(NamedTuple):
    """A piece: ``contiguous`` bytes at ``start``, repeated by the loops, inner first.

    A loop is how many times, at least 2, and how many bytes from one to the next.
    """

    start: int
    contiguous: int
    loops: Sequence[tuple[int, int]] = ()

    @property
    def stop(self) -> int:
        """Where its last byte ends."""
        reach = sum([(times - 1) * step for times, step in self.loops])
        return self.start + reach + self.contiguous

    @property
    def nbytes(self) -> int:
        """Bytes that it has itself."""
        return self.contiguous * prod([times for times, _ in self.loops])


class Rows(NamedTuple):
    """Rows of ``row_bytes``, each ``stride`` bytes after the one before."""

    start: int
    rows: int
    row_bytes: int
    stride: int


def gaps(start: int, stop: int, pieces: Sequence[Strided]) -> list[Rows]:
    """Return every byte from ``start`` up to ``stop`` that is in no piece, once.

    The pieces lie in between, and no byte is in two of them. Pieces that repeat with
    the same step, as columns of one matrix, make rows, however many they are.
    """
    if sum([piece.nbytes for piece in pieces]) == stop - start:
        return []
    found: list[Rows] = []
    at = start
    for cluster, end in _clusters(pieces):
        found += _row(at, cluster[0].start)
        found += _among(cluster, end)
        at = end
    return found + _row(at, stop)


def _row(start: int, stop: int) -> list[Rows]:
    size = stop - start
    return [Rows(start, 1, size, size)] if size else []


def _clusters(pieces: Iterable[Strided]) -> Iterator[tuple[list[Strided], int]]:
    """Pieces whose extents overlap, by their start, and where their extents end."""
    cluster: list[Strided] = []
    end = 0
    for piece in sorted(pieces):
        if cluster and piece.start >= end:
            yield cluster, end
            cluster = []
        cluster.append(piece)
        end = max(end, piece.stop)
    if cluster:
        yield cluster, end


def _among(cluster: Sequence[Strided], stop: int) -> list[Rows]:
    """The gaps from the first byte of a cluster to its last."""
    start = cluster[0].start
    outer = {piece.loops[-1] if piece.loops else (1, 0) for piece in cluster}
    times, step = max(outer, key=lambda loop: loop[1])
    if times == 1:
        return []
    inner = [_unrolled(piece, 0) for piece in cluster]
    if len(outer) == 1 and max([piece.stop for piece in inner]) <= start + step:
        last = (times - 1) * step
        found = _repeated(gaps(start, start + step, inner), times - 1, step)
        rest = [_unrolled(piece, last) for piece in cluster]
        return found + gaps(start + last, stop, rest)
    unrolled: list[Strided] = []
    for piece in cluster:
        if piece.loops and piece.loops[-1] == (times, step):
            unrolled += [_unrolled(piece, number * step) for number in range(times)]
        else:
            unrolled.append(piece)
    return gaps(start, stop, unrolled)


def _unrolled(piece: Strided, distance: int) -> Strided:
    """What the outermost loop repeats, so many bytes further on."""
    return Strided(piece.start + distance, piece.contiguous, piece.loops[:-1])


def _repeated(found: Iterable[Rows], times: int, step: int) -> list[Rows]:
    """The same several times: the longer one of two loops becomes the rows."""
    repeated: list[Rows] = []
    for start, rows, row_bytes, stride in found:
        if times > rows:
            starts = [start + row * stride for row in range(rows)]
            repeated += [Rows(first, times, row_bytes, step) for first in starts]
        else:
            starts = [start + number * step for number in range(times)]
            repeated += [Rows(first, rows, row_bytes, stride) for first in starts]
    return repeated
