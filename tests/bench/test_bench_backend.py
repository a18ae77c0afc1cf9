"""The benchmark of the backend: every figure is there, and its bytes are verified."""

from __future__ import annotations

import pytest

from weightsync import testing
from weightsync.bench import cli, tables
from weightsync.bench.backend import BackendCase, run
from weightsync.bench.backend_calls import BATCH, KINDS
from weightsync.bench.backend_ranks import RANKS


@testing.requires_emulator()
def test_both_backends_are_measured_and_verified() -> None:
    (case,) = cli.parse(["backend", "--batches", "2"]).cases
    assert isinstance(case, BackendCase)
    found = run(case)
    shown = tables.table(found).plain()

    assert [*KINDS] == [row.name for row in found.rows]
    counts = [(row.ours.count, row.theirs.count) for row in found.rows]
    each, at_once = (2 * BATCH, 2 * BATCH), (2, 2)
    assert [each, each, each, each, at_once, each] == counts
    # Each rank verifies one word of a reduction and all that were put, after every
    # batch of each backend, the first one included.
    words = 2 * 1 + 4 * BATCH
    assert RANKS * 3 * 2 * words * 4 == found.verified
    assert all(row.ratio == row.ours.p50 / row.theirs.p50 for row in found.rows)
    assert all(0 < row.low <= row.high for row in found.rows)
    # Three times as fast or more, so also where other work runs.
    assert [] == [(row.name, row.ratio) for row in found.rows if not row.met]
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
