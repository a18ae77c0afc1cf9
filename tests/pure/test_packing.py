"""Runs become puts through chunks: every byte once, and as many puts as are counted."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.packing import HEADER_AT, PUT_BYTES, Packed, count_puts, pack
from weightsync.plan import Cast, Run
from weightsync.slots import HEADER_BYTES

SMALL = 256
"""Most bytes of a put in these tests."""

BASE, HEADER = 1000, 8

CONVERTED = 100
"""So many more is the number of a source that was converted."""

Copied = dict[int, tuple[int, int]]
"""Byte of the target: source, and byte of that source."""


@st.composite
def runs(draw: Any) -> list[Run]:
    """Runs that do not overlap at the target."""
    found: list[Run] = []
    end = 0
    for source in range(draw(st.integers(1, 4))):
        rows, size = draw(st.integers(1, 12)), draw(st.integers(1, 600))
        apart = draw(st.sampled_from([0, 0, 7]))
        stride = size + draw(st.sampled_from([0, 5]))
        start = draw(st.integers(0, 50))
        found.append(Run(source, start, end, rows, size, stride, size + apart))
        end += rows * (size + apart) + 3
    return found


def planned(given_runs: list[Run]) -> Copied:
    found: Copied = {}
    for run in given_runs:
        for row in range(run.rows):
            target = BASE + run.target_offset + row * run.target_stride
            source = run.source_offset + row * run.source_stride
            for byte in range(run.row_bytes):
                found[target + byte] = run.source, source + byte
    return found


def carried_out(packed: Packed, found: Copied) -> None:
    """Follow every byte through one chunk, but for the header."""
    chunk: Copied = {}
    for source, start, at, rows, size, stride, step in packed.copies.tolist():
        for row in range(rows):
            for byte in range(size):
                assert at + row * step + byte not in chunk
                chunk[at + row * step + byte] = source, start + row * stride + byte
    assert max(chunk) < SMALL
    for _, start, target, rows, size, stride, step in packed.runs.tolist():
        if start == HEADER_AT:
            continue
        for row in range(rows):
            for byte in range(size):
                assert target + row * step + byte not in found
                found[target + row * step + byte] = chunk[start + row * stride + byte]


@settings(deadline=None)
@given(runs())
def test_every_byte_is_packed_and_put_exactly_once(given_runs: list[Run]) -> None:
    found: Copied = {}
    for packed in pack(given_runs, BASE, HEADER, SMALL):
        carried_out(packed, found)

    assert planned(given_runs) == found


def converted(packed: Packed) -> Copied:
    """Follow every byte that is converted into a chunk."""
    chunk: Copied = {}
    for number, start, rows, numel, stride, dtype, at in packed.conversions:
        source, size = number + CONVERTED, numel * dtype.itemsize
        for row, byte in product(range(rows), range(size)):
            assert at + row * size + byte not in chunk
            place = (start + row * stride) * dtype.itemsize + byte
            chunk[at + row * size + byte] = source, place
    return chunk


def put_straight(packed: Packed, found: Copied) -> None:
    """Follow every byte out of a chunk or out of its source, but for the header."""
    chunk: Copied = {}
    for source, start, at, rows, size, stride, step in packed.copies.tolist():
        for row in range(rows):
            for byte in range(size):
                chunk[at + row * step + byte] = source, start + row * stride + byte
    chunk |= converted(packed)
    assert max(chunk, default=0) < SMALL
    for tensor, start, target, rows, size, stride, step in packed.runs.tolist():
        for row in range(0 if start == HEADER_AT else rows):
            for byte in range(size):
                at = start + row * stride + byte
                place = (packed.sources[tensor - 1], at) if tensor else chunk[at]
                found[target + row * step + byte] = place


@settings(deadline=None)
@given(runs())
def test_what_need_not_be_packed_is_put_from_where_it_lies_in_as_many_puts(
    given_runs: list[Run],
) -> None:
    found: Copied = {}
    batches = pack(given_runs, BASE, HEADER, SMALL, straight=True)
    for packed in batches:
        put_straight(packed, found)
    copied = sum(len(packed.copies) for packed in batches)
    gathered = [
        run
        for run in given_runs
        if run.rows > 1 and run.source_stride > run.row_bytes == run.target_stride
    ]

    assert planned(given_runs) == found
    assert count_puts(given_runs, SMALL) + 1 == sum(
        int(packed.runs[:, 3].sum()) for packed in batches
    )
    assert bool(copied) <= bool(gathered)


@settings(deadline=None)
@given(runs())
def test_there_are_as_many_puts_as_are_counted_and_the_header_is_last(
    given_runs: list[Run],
) -> None:
    batches = pack(given_runs, BASE, HEADER, SMALL)
    rows = sum(int(packed.runs[:, 3].sum()) for packed in batches)
    size = HEADER_BYTES

    assert count_puts(given_runs, SMALL) + 1 == rows
    assert [0, HEADER_AT, HEADER, 1, size, size, size] == batches[-1].runs[-1].tolist()
    assert [False] * (len(batches) - 1) + [True] == [each.header for each in batches]


CASTS = [("bfloat16", 2), ("float32", 4), ("float64", 8), ("float8_e5m2", 1)]


@st.composite
def casts(draw: Any, start: int) -> list[Cast]:
    """Casts of whole elements, from a byte of the target on."""
    found: list[Cast] = []
    end = start + -start % 64
    for source in range(draw(st.integers(0, 4))):
        dtype, itemsize = draw(st.sampled_from(CASTS))
        rows, size = draw(st.integers(1, 9)), itemsize * draw(st.integers(1, 60))
        stride = size + itemsize * draw(st.sampled_from([0, 3]))
        step = size + itemsize * draw(st.sampled_from([0, 0, 2]))
        first = itemsize * draw(st.integers(0, 9))
        found.append(Cast(dtype, Run(source, first, end, rows, size, stride, step)))
        end += rows * step + 64
        end += -end % 64
    return found


@settings(deadline=None)
@given(st.data(), runs(), st.booleans())
def test_what_is_converted_is_put_from_chunks_beside_what_is_not(
    data: st.DataObject, given_runs: list[Run], straight: bool
) -> None:
    last = given_runs[-1]
    end = last.target_offset + last.rows * last.target_stride
    given_casts = data.draw(casts(end))
    batches = pack(
        given_runs, BASE, HEADER, SMALL, casts=given_casts, straight=straight
    )
    found: Copied = {}
    for packed in batches:
        put_straight(packed, found)
    others = [run._replace(source=run.source + CONVERTED) for _, run in given_casts]

    assert planned([*given_runs, *others]) == found
    assert count_puts([*given_runs, *others], SMALL) + 1 == sum(
        int(packed.runs[:, 3].sum()) for packed in batches
    )


def test_rows_that_lie_together_at_the_target_are_one_put() -> None:
    run = Run(0, 0, 0, 8, 4, 100, 4)
    (packed,) = pack([run], BASE, HEADER)

    assert 1 == count_puts([run])
    assert [0, 0, BASE, 1, 32, 32, 32] == packed.runs[0].tolist()
    assert [0, 0, 0, 8, 4, 100, 4] == packed.copies[0].tolist()


def test_nothing_is_put_where_there_is_nothing() -> None:
    assert 0 == count_puts([])
    assert () == pack([], BASE, HEADER)
    assert torch.int64 == pack([Run(0, 0, 0, 1, 1, 1, 1)], 0, 0)[0].runs.dtype
    assert PUT_BYTES == HEADER_AT
