"""The simulation of a large pool, small: what it shows, and that it notices errors."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from weightsync.bench import cli, pool, tables
from weightsync.bench.patterns import VerificationError
from weightsync.bench.pool import PoolCase
from weightsync.bench.pool_job import Job, Store
from weightsync.bench.pool_parties import Sizes
from weightsync.bench.results import PoolResult, Report

if TYPE_CHECKING:
    from pathlib import Path

SMALL = PoolCase(20, 8, 2, pushes=20, failing=30)


def test_every_push_ends_alike_and_every_replica_has_the_last_version() -> None:
    result = pool.run(SMALL)
    (row,) = result.rows
    lines = tables.table(result).plain()

    assert (20 + 2) * 20 + 8 == row.verified == result.verified
    assert row.failures > 3
    assert row.quiet is not None
    assert row.frozen is not None
    assert row.quiet.p50 < row.frozen.p99 < 15
    assert 0 < row.push_cpu.p50 < 1
    assert f"{row.failures} failures" in lines
    assert "store: calls of a replica that joins" in lines


def test_pushes_need_no_store_and_leave_nothing_behind() -> None:
    (row,) = pool.run(PoolCase(10, 4, 2, pushes=30, failing=0)).rows

    # Each trainer rank but the first looks for the leader, a hub too; a rank for its
    # hub; leader and hubs say where they are.
    assert 1 + 9 + 4 * (1 + 1 + 1) == row.store_start
    assert 3 == row.store_join
    assert 0 == row.store_rate == row.failures
    assert row.died is row.frozen is row.joined is None
    assert abs(row.kept_last - row.kept_first) < 1024


def test_a_push_takes_few_messages_for_each_rank_and_replica() -> None:
    (row,) = pool.run(PoolCase(10, 4, 2, pushes=5, failing=0)).rows

    # A rank asks and hears the outcome; for each replica it puts and says so, and each
    # hub gives credit, is told what to expect, and delivers.
    assert 10 * (2 + 2 * 4) + 4 * 3 == row.messages
    # Credit, expect and deliver for the leader; credit, expect, arrived and commit for
    # each rank.
    assert 3 + 2 * 4 == row.hub_messages


def test_a_replica_that_misses_a_version_is_noticed() -> None:
    job = Job(Sizes(4, 2, 2), Random(1))
    job.start()
    job.push(1.0)
    replica = next(iter(job._replicas.values()))
    replica._look = lambda: None  # type: ignore[method-assign] # breaks it on purpose

    with pytest.raises(VerificationError, match="has version 1, not 2"):
        job.finish()


def test_outcomes_that_differ_are_noticed() -> None:
    job = Job(Sizes(4, 1, 1), Random(1))
    job.start()
    other = job._trainers[2]
    other._end = lambda message: None  # type: ignore[method-assign] # breaks it on purpose
    other._handlers = {
        kind: handler
        for kind, handler in other._handlers.items()
        if kind.__name__ != "PushEnded"
    }

    with pytest.raises(VerificationError, match="push 1 did not end on rank 2"):
        job.push(1.0)


def test_the_store_counts_its_calls() -> None:
    store = Store()
    store.set("a", b"1")

    assert b"1" == store.compare_set("a", b"", b"")
    assert 2 == store.calls


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = [
        "pool",
        "--trainers",
        "3",
        "--replicas",
        "2",
        "--ranks",
        "2",
        "--pushes",
        "3",
        "--json",
    ]
    code = cli.main([*arguments, str(file)])
    report = msgspec.json.decode(file.read_bytes(), type=Report, strict=True)
    (result,) = report.results

    assert 0 == code
    assert isinstance(result, PoolResult)
    assert (3, 2, 3) == tuple(
        result.parameters[name] for name in ("trainers", "replicas", "pushes")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pool", "--failing", "101"], "no percentage"),
        (["pool", "--every", "0"], "no number of seconds"),
        (["pool", "--plot", "out.png"], "draws nothing"),
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(arguments)

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["pool", "--help"])

    assert 0 == ended.value.code
    assert "replicas of 100 that fail in a minute" in " ".join(
        capsys.readouterr().out.split()
    )
