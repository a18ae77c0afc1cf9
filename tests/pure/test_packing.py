"""Runs become puts through chunks: every byte once, and as many puts as are counted."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.packing import HEADER_AT, PUT_BYTES, Packed, count_puts, pack
from weightsync.plan import Run
from weightsync.slots import HEADER_BYTES

SMALL = 256
"""Most bytes of a put in these tests."""

BASE, HEADER = 1000, 8

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


def put_straight(packed: Packed, found: Copied) -> None:
    """Follow every byte out of a chunk or out of its source, but for the header."""
    chunk: Copied = {}
    for source, start, at, rows, size, stride, step in packed.copies.tolist():
        for row in range(rows):
            for byte in range(size):
                chunk[at + row * step + byte] = source, start + row * stride + byte
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
