"""The benchmark of the emulator: every figure is there, and its bytes are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync import testing
from weightsync.bench import cli, tables
from weightsync.bench.emulator import EmulatorCase, run

if TYPE_CHECKING:
    from weightsync.bench.results import EmulatorResult

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

REDUCED = ("c", "nccl", "nccl2")


def result_of(line: str) -> EmulatorResult:
    (case,) = cli.parse(["emulator", *line.split()]).cases
    assert isinstance(case, EmulatorCase)
    return run(case)


def test_the_emulator_is_measured_and_verified() -> None:
    found = result_of("--size 1MiB --starts 1 --puts 3 --batches 2")
    start, put, *reduced = found.rows
    shown = tables.table(found).plain()

    assert ["start", "put", *(f"all-reduce by {name}" for name in REDUCED)] == [
        row.name for row in found.rows
    ]
    assert [1, 3, 32, 32, 32] == [row.measured.count for row in found.rows]
    # One put and one batch are not counted; both ranks verify their four bytes.
    assert 4 * (1 << 20) + 2 * 3 * (2 + 1) * 4 == found.verified
    assert start.beside is not None
    assert start.measured.p50 - start.beside.p50 == start.value
    assert put.beside is not None
    assert put.beside.p50 / put.measured.p50 == put.value
    assert all(0 < row.best <= row.measured.p50 for row in found.rows)
    assert all(row.met == (row.value < 200e-6) for row in reduced)
    assert "not of any GPU" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--size 12", "multiple of 8"),
        ("--puts 0", "at least 1"),
        ("--batches 4001", "at most 4000"),
        ("--plot out.svg", "draws nothing"),
    ],
)
def test_a_wrong_argument_of_the_emulator_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["emulator", *line.split()])

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err
