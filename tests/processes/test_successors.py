"""Replicas that come under the name of one that died, is silent, or is there."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import Outcome, ask, call
from tests.processes.pools import SECONDS, Pool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.harness import Child, Processes

NUMEL = 4096
LEASE = 2.0
TAKEN = "there is a replica 'g' in the pool already"


@pytest.fixture
def file_address(tmp_path: Path) -> str:
    """An address at which the leader can be found while it is stopped."""
    return f"file://{tmp_path / 'store'}"


def _pool(processes: Processes, address: str, *, lease: float = 10.0) -> Pool:
    return Pool(processes, address, numel=NUMEL, trainers=1, lease=lease)


def _received(pool: Pool, child: Child, version: int) -> Outcome:
    """Push, and receive on one process whatever others have its name."""
    ask(child, "receive", timeout=SECONDS)
    assert ("g",) == pool.push(version).value.delivered
    outcome: Outcome = child.hear()
    return outcome


@pytest.mark.parametrize("order", ["comes before it goes on", "comes afterwards"])
def test_a_replica_takes_the_name_of_one_that_died_while_the_leader_was_stopped(
    order: str, processes: Processes, file_address: str
) -> None:
    pool = _pool(processes, file_address)
    (old,), (leader,) = pool.join("g"), pool.trainers
    leader.kill(signal.SIGSTOP)
    old.kill()
    old.join()
    if order == "comes before it goes on":
        (new,) = pool.start("g")
        assert not new.poll(1.0)
        leader.kill(signal.SIGCONT)
    else:
        leader.kill(signal.SIGCONT)
        (new,) = pool.start("g")
    opened = new.hear()
    pool.until_joined()
    report = pool.deliver(1).value
    pool.close()

    assert "open" == opened
    assert ("g",) == report.delivered


def test_who_comes_before_the_end_of_the_owner_of_its_name_is_read_waits_for_that(
    processes: Processes, address: str
) -> None:
    pool = _pool(processes, address)
    (old,) = pool.join("g")
    old.kill(signal.SIGSTOP)  # so that its end comes later than the other, surely
    (new,) = pool.start("g")
    waits = not new.poll(1.0)
    old.kill()
    started = time.monotonic()
    opened = new.hear()
    seconds = time.monotonic() - started
    pool.until_joined()
    report = pool.deliver(1).value
    pool.close()

    assert (True, "open") == (waits, opened)
    assert seconds < 5.0
    assert ("g",) == report.delivered


def test_who_comes_under_the_name_of_one_that_is_there_is_refused_at_once(
    processes: Processes, address: str
) -> None:
    pool = _pool(processes, address)
    (old,) = pool.join("g")
    started = time.monotonic()
    told = pool.start("g")[0].refusal()
    seconds = time.monotonic() - started
    received = _received(pool, old, 1)
    pool.forget("g")
    pool.close()

    assert TAKEN in told
    assert seconds < 5.0
    assert 1 == received.value.version


def test_who_waits_for_a_name_is_refused_once_its_owner_goes_on(
    processes: Processes, address: str
) -> None:
    pool = _pool(processes, address)
    (old,) = pool.join("g")
    old.kill(signal.SIGSTOP)
    (new,) = pool.start("g")
    waits = not new.poll(1.0)
    old.kill(signal.SIGCONT)
    told = new.refusal()
    received = _received(pool, old, 1)
    pool.forget("g")
    pool.close()

    assert waits
    assert TAKEN in told
    assert 1 == received.value.version


def test_a_name_whose_owner_has_vanished_is_free_when_its_lease_ends(
    processes: Processes, address: str
) -> None:
    pool = _pool(processes, address, lease=LEASE)
    (old,) = pool.join("g")
    old.kill(signal.SIGSTOP)  # whose host closes nothing: so it is where one vanishes
    (new,) = pool.start("g")
    waits = not new.poll(LEASE / 4)
    opened = new.hear()
    pool.until_joined()
    report = pool.deliver(1).value
    old.kill(signal.SIGCONT)
    told = [call(old, "receive", timeout=SECONDS) for _ in range(2)]
    received = _received(pool, new, 2)
    pool.close()

    assert (True, "open") == (waits, opened)
    assert ("g",) == report.delivered
    assert ["PeerError", "PlanError"] == [outcome.kind for outcome in told]
    assert TAKEN == told[1].value
    assert 2 == received.value.version


def test_the_name_of_a_replica_with_a_silent_rank_is_free_when_that_lease_ends(
    processes: Processes, address: str
) -> None:
    pool = _pool(processes, address, lease=LEASE)
    old = pool.join("g", ranks=2)
    old[1].kill(signal.SIGSTOP)
    new = pool.start("g", ranks=2)
    opened = [rank.hear() for rank in new]
    failed = call(pool.trainers[0], "event", kind="failed").value
    pool.until_joined()
    report = pool.deliver(1).value
    pool.close()

    assert ["open"] * 2 == opened
    assert "rank 1 of replica 'g' gave no sign of life" in failed.reason
    assert ("g",) == report.delivered
