"""The benchmark of the backend: every figure is there, and its bytes are verified."""

from __future__ import annotations

import pytest

from weightsync import testing
from weightsync.bench import cli, tables
from weightsync.bench.backend import BackendCase, run
from weightsync.bench.backend_ranks import BATCH, CALLS, RANKS


@testing.requires_emulator()
def test_both_backends_are_measured_and_verified() -> None:
    (case,) = cli.parse(["backend", "--batches", "2"]).cases
    assert isinstance(case, BackendCase)
    found = run(case)
    shown = tables.table(found).plain()

    assert [*CALLS] == [row.name for row in found.rows]
    counts = {(row.ours.count, row.theirs.count) for row in found.rows}
    assert {(2 * BATCH, 2 * BATCH)} == counts
    # Each rank verifies its four bytes after every batch of each backend.
    assert RANKS * 3 * 2 * len(CALLS) * 4 == found.verified
    assert all(row.ratio == row.ours.p50 / row.theirs.p50 for row in found.rows)
    assert all(row.met == (row.ratio <= 1.0) for row in found.rows)
    assert "not of any GPU" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [("--batches 0", "at least 1"), ("--plot out.svg", "draws nothing")],
)
def test_a_wrong_argument_of_the_backend_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["backend", *line.split()])

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err
