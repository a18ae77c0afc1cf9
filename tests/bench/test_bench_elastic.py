"""The benchmark of elastic pools, small: every figure is there and bytes are right."""

from __future__ import annotations

import pytest
import torch

from weightsync.bench import cli, elastic, tables
from weightsync.bench.elastic import ElasticCase
from weightsync.bench.elastic_ranks import Held
from weightsync.bench.patterns import VerificationError

LEASE = 0.5


def test_deaths_freezes_and_joins_are_measured() -> None:
    line = "elastic --size 4MiB --deaths 1 --freezes 1 --leases 0.5 --cycles 1"
    (case,) = cli.parse([*line.split(), "--starts", "1"]).cases
    assert isinstance(case, ElasticCase)
    found = elastic.run(case)
    shown = tables.table(found).plain()

    rows = {row.name: row for row in found.rows}
    killed = [row for name, row in rows.items() if name.startswith("killed")]
    assert [1, 1] == [row.measured.count for row in killed]
    assert all(0 < row.value < elastic.DIED_ASKED for row in killed)
    frozen = rows["frozen, a lease of 0.5 s"].value
    assert LEASE / 2 < frozen < LEASE + elastic.DIED_ASKED
    pool, first = (rows[f"B joins: {what}"].value for what in elastic.JOINS)
    assert 0 < pool < first
    ratios = [row for row in found.rows if row.unit == "ratio"]
    assert 7 == len(ratios)
    for row in ratios:
        assert row.beside is not None
        assert row.value == row.measured.p50 / row.beside.p50
        assert row.met == (row.asked is None or row.value < row.asked)
    assert case.size < found.verified
    assert 0 == found.verified % case.size
    assert "are right" in shown


def test_a_byte_that_is_wrong_is_noticed() -> None:
    held = Held(1 << 20, 1, 2)
    held.fill(3)
    whole = held.verify(3)
    held.tensors[5].view(torch.uint8)[0, -1] += 1

    assert 1 << 19 == whole
    with pytest.raises(VerificationError, match=r"layers.5.weight is not all 3"):
        held.verify(3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--size 64KiB", "at least 256 KiB"),
        ("--leases 0.1", "at least 0.2"),
        ("--leases soon", "invalid"),
        ("--plot out.svg", "draws nothing"),
    ],
)
def test_a_wrong_argument_of_elastic_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["elastic", *line.split()])

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err
