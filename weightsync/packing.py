"""How the runs of a plan become few large puts through a buffer of bounded size; pure.

Runs are cut into pieces of at most ``PUT_BYTES``, which are packed into chunks. Each
piece is one put where its rows lie together at the target, else one put a row. Both
ends of a link count them alike, because each put signals once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from weightsync.plan import ALIGNMENT, Run
from weightsync.slots import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

PUT_BYTES: Final = 8 << 20
"""The most that one put moves. Both ends of a link must have the same."""

CHUNK_BYTES: Final = PUT_BYTES + 4096
"""A chunk of the buffer: what is packed, and then the header."""

HEADER_AT: Final = PUT_BYTES
"""Where the header lies in the chunk that is put last."""

Row = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Packed:
    """What is packed into one chunk and put from there; both are tables of runs.

    The window of ``copies`` is the chunk, and so is tensor 0 of ``runs``. ``header``
    says that the header is the last of them.
    """

    copies: Tensor
    runs: Tensor
    header: bool = False


def count_puts(runs: Iterable[Run], limit: int = PUT_BYTES) -> int:
    """How many puts of at most ``limit`` bytes these runs become."""
    return sum([_puts_of(run, limit) for run in runs])


def pack(
    runs: Sequence[Run], base: int, header: int, limit: int = PUT_BYTES
) -> tuple[Packed, ...]:
    """Cut and pack runs whose slot begins at ``base`` of the window.

    The header is put to byte ``header`` of the window, after everything else.
    """
    groups = list(_groups(runs, limit))
    last = len(groups) - 1
    packed: list[Packed] = []
    for number, group in enumerate(groups):
        puts = [_put(piece, at, base) for piece, at in group]
        if number == last:
            size = HEADER_BYTES
            puts.append((0, HEADER_AT, header, 1, size, size, size))
        copies = [_copy(piece, at) for piece, at in group]
        packed.append(Packed(_table(copies), _table(puts), number == last))
    return tuple(packed)


def _groups(runs: Sequence[Run], limit: int) -> Iterator[list[tuple[Run, int]]]:
    """Pieces that fit into a chunk together, and where each begins there."""
    group: list[tuple[Run, int]] = []
    end = 0
    for run in runs:
        for piece in _pieces(run, limit):
            if end + piece.nbytes > limit:
                yield group
                group, end = [], 0
            group.append((piece, end))
            end += piece.nbytes + -piece.nbytes % ALIGNMENT
    if group:
        yield group


def _pieces(run: Run, limit: int) -> Iterator[Run]:
    if run.row_bytes > limit:
        for row in range(run.rows):
            yield from _parts_of_row(run, row, limit)
        return
    each = limit // run.row_bytes
    for first in range(0, run.rows, each):
        yield run._replace(
            source_offset=run.source_offset + first * run.source_stride,
            target_offset=run.target_offset + first * run.target_stride,
            rows=min(each, run.rows - first),
        )


def _parts_of_row(run: Run, row: int, limit: int) -> Iterator[Run]:
    source = run.source_offset + row * run.source_stride
    target = run.target_offset + row * run.target_stride
    for start in range(0, run.row_bytes, limit):
        size = min(limit, run.row_bytes - start)
        yield Run(run.source, source + start, target + start, 1, size, size, size)


def _puts_of(run: Run, limit: int) -> int:
    if run.row_bytes > limit:
        return run.rows * -(-run.row_bytes // limit)
    if _is_dense(run):
        return -(-run.rows // (limit // run.row_bytes))
    return run.rows


def _is_dense(run: Run) -> bool:
    """Whether the rows lie together at the target."""
    return run.rows == 1 or run.target_stride == run.row_bytes


def _put(piece: Run, at: int, base: int) -> Row:
    target = base + piece.target_offset
    if _is_dense(piece):
        return 0, at, target, 1, piece.nbytes, piece.nbytes, piece.nbytes
    size = piece.row_bytes
    return 0, at, target, piece.rows, size, size, piece.target_stride


def _copy(piece: Run, at: int) -> Row:
    start, size = piece.source_offset, piece.row_bytes
    return piece.source, start, at, piece.rows, size, piece.source_stride, size


def _table(rows: Sequence[Row]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
