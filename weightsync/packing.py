"""How a plan becomes few large puts through a buffer of bounded size; pure.

Runs are cut into pieces of at most ``PUT_BYTES``, which are packed into chunks. Each
piece is one put where its rows lie together at the target, else one put a row. Both
ends of a link count them alike, because each put signals once. Where sources need not
be copied they are put as they lie, in the same puts, but for rows that only lie
together at the target: each would be a put of its own. What is converted is cut and
packed in the same way, and is put from a chunk in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weightsync.casting import Conversion
from weightsync.plan import ALIGNMENT, Cast, Run
from weightsync.slots import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

PUT_BYTES: Final = 8 << 20
"""The most that one put moves. Both ends of a link must have the same."""

CHUNK_BYTES: Final = PUT_BYTES + 4096
"""A chunk of the buffer: what is packed, and then the header."""

BATCH: Final = 8
"""So many times what fits into a chunk is put at once, where it is not packed."""

HEADER_AT: Final = PUT_BYTES
"""Where the header lies in the chunk that is put last."""

Row = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Packed:
    """What is packed into one chunk and put from there; both are tables of runs.

    The window of ``copies`` is the chunk, and so is tensor 0 of ``runs``. Its others
    are the ``sources`` themselves, by their indices. ``header`` says that the header is
    the last of the runs. ``conversions`` are made in the chunk.
    """

    copies: Tensor
    runs: Tensor
    header: bool = False
    sources: tuple[int, ...] = ()
    conversions: tuple[Conversion, ...] = ()


def count_puts(runs: Iterable[Run], limit: int = PUT_BYTES) -> int:
    """How many puts of at most ``limit`` bytes these runs become."""
    return sum([_puts_of(run, limit) for run in runs])


def pack(
    runs: Iterable[Run],
    base: int,
    header: int,
    limit: int = PUT_BYTES,
    *,
    casts: Iterable[Cast] = (),
    straight: bool = False,
) -> tuple[Packed, ...]:
    """Cut and pack runs and casts whose slot begins at ``base`` of the window.

    The header is put to byte ``header`` of the window, after everything else. With
    ``straight`` nothing is packed but what has to be.
    """
    groups = list(_groups(runs, casts, limit, straight=straight))
    last = len(groups) - 1
    packed: list[Packed] = []
    for number, group in enumerate(groups):
        used = dict.fromkeys([one.piece.source for one in group if one.at is None])
        tensors = {source: index for index, source in enumerate(used, 1)}
        puts = [_put(one.piece, one.at, base, tensors) for one in group]
        if number == last:
            size = HEADER_BYTES
            puts.append((0, HEADER_AT, header, 1, size, size, size))
        tables = _table(_copies(group)), _table(puts)
        found = tuple(used), _conversions(group)
        packed.append(Packed(*tables, number == last, *found))
    return tuple(packed)


class _Placed(NamedTuple):
    """A piece, and where it begins in the chunk; None where it is put as it lies.

    ``dtype`` is what it is converted to, if it is.
    """

    piece: Run
    at: int | None
    dtype: str | None


def _groups(
    runs: Iterable[Run], casts: Iterable[Cast], limit: int, *, straight: bool
) -> Iterator[list[_Placed]]:
    """Pieces that are put together.

    They fit into a chunk; what is one put as it lies takes no room there.
    """
    group: list[_Placed] = []
    end = nbytes = 0
    for dtype, run in chain([(None, run) for run in runs], casts):
        for piece in _pieces(run, limit):
            lies = straight and dtype is None and _lies_ready(piece)
            room = 0 if lies and _is_dense(piece) else piece.nbytes
            if end + room > limit or nbytes + piece.nbytes > BATCH * limit:
                yield group
                group, end, nbytes = [], 0, 0
            group.append(_Placed(piece, None if lies else end, dtype))
            end += room + -room % ALIGNMENT
            nbytes += piece.nbytes
    if group:
        yield group


def _copies(group: Iterable[_Placed]) -> list[Row]:
    return [
        _copy(piece, at)
        for piece, at, dtype in group
        if at is not None and dtype is None
    ]


def _conversions(group: Iterable[_Placed]) -> tuple[Conversion, ...]:
    return tuple(
        [
            Conversion.of(Cast(dtype, piece), at)
            for piece, at, dtype in group
            if at is not None and dtype is not None
        ]
    )


def _lies_ready(piece: Run) -> bool:
    """Whether it takes no more puts from where it lies than from a chunk."""
    together = piece.rows == 1 or piece.source_stride == piece.row_bytes
    return together or not _is_dense(piece)


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


def _put(piece: Run, at: int | None, base: int, tensors: Mapping[int, int]) -> Row:
    """From byte ``at`` of the chunk, or from where the piece lies in its tensor."""
    tensor, start, step = 0, at, piece.row_bytes
    if start is None:
        tensor, start = tensors[piece.source], piece.source_offset
        step = piece.source_stride
    target = base + piece.target_offset
    if _is_dense(piece):
        return tensor, start, target, 1, piece.nbytes, piece.nbytes, piece.nbytes
    rows, size = piece.rows, piece.row_bytes
    return tensor, start, target, rows, size, step, piece.target_stride


def _copy(piece: Run, at: int) -> Row:
    start, size = piece.source_offset, piece.row_bytes
    return piece.source, start, at, piece.rows, size, piece.source_stride, size


def _table(rows: Sequence[Row]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
