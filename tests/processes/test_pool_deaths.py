"""Trainers and replicas of several ranks: one of them dies or freezes in a push."""

from __future__ import annotations

import signal
import time
from statistics import median
from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call
from tests.processes.engines import slow_on_nccl
from tests.processes.pools import Pool, mebibytes

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes

TIMEOUT = 5.0
GRACE = 3.0
SLOWER = 3.0
"""How much longer a push may take than usual; the machine may be busy."""


def _arm(watcher: Child, victim: Child, number: signal.Signals) -> None:
    """Send a signal to a process when the first byte of the next version arrives."""
    call(watcher, "kill_at_first_byte", pid=victim.pid, number=number)
    ask(watcher, "receive", timeout=TIMEOUT + GRACE)


def _deliver_to_an_earlier_pair(pool: Pool) -> float:
    """Let one come and go; trainers keep memory for the next. Return a push's seconds.

    Versions 1 to 4.
    """
    pool.join("earlier", ranks=2, mode="swap")
    pushes = [pool.deliver(version, *pool.replicas) for version in (1, 2, 3)]
    driven.close(*pool.forget("earlier"))
    pool.deliver(4, *pool.replicas)
    return median([push.seconds for push in pushes])


def _told(rank: Child) -> driven.Outcome:
    """What a receive raises, after a version that was whole."""
    told = call(rank, "receive", timeout=TIMEOUT)
    return call(rank, "receive", timeout=TIMEOUT) if told.kind == "ok" else told


@slow_on_nccl
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_push_costs_the_others_neither_bytes_nor_time(
    engine: Engine, processes: Processes, address: str, size: int
) -> None:
    before = driven.in_shared_memory()
    pool = Pool(processes, address, numel=mebibytes(size, engine))
    pool.join("G0")
    (watch,) = pool.join("watch", mode="inplace")
    usual = _deliver_to_an_earlier_pair(pool)
    descriptors = pool.descriptors(*pool.ranks())
    pool.join("pair", ranks=2, mode="swap")
    pool.deliver(5, "G0", "pair", "watch")
    _arm(watch, pool.replicas["pair"][1], signal.SIGKILL)
    pool.begin(6, timeout=TIMEOUT)
    pool.receive(6, "G0")
    spoiled = pool.ended()
    watched = watch.hear()
    (widow, _) = pool.forget("pair")
    seconds = [pool.deliver(version, "G0", "watch").seconds for version in (7, 8, 9)]
    told = _told(widow)
    left = pool.descriptors(*pool.ranks())
    closed = pool.close() + driven.close(widow)

    assert "ok" == spoiled.kind
    assert {"pair"} >= set(spoiled.value.failed)
    assert spoiled.seconds < GRACE
    assert ("ok", 6) == (watched.kind, watched.value.version)
    assert "PeerError" == told.kind
    assert "rank 1 of replica 'pair'" in told.value
    assert median(seconds) < SLOWER * usual + 0.1
    grown = [after - held for held, after in zip(descriptors, left, strict=True)]
    assert max(grown) <= 2, grown
    assert closed < 5.0
    assert before == driven.in_shared_memory()


@slow_on_nccl
@pytest.mark.parametrize(
    "frozen", [3.5, pytest.param(10.0, marks=pytest.mark.slow)], ids=str
)
def test_a_rank_that_is_stuck_costs_the_push_its_timeout_and_writes_nothing_later(
    engine: Engine, processes: Processes, address: str, frozen: float
) -> None:
    pool = Pool(processes, address, numel=MIB)
    (first,) = pool.join("G0")
    stuck = pool.join("G1", ranks=2)[1]
    pool.deliver(1, "G0", "G1")
    stuck.kill(signal.SIGSTOP)
    since = time.monotonic()
    pool.begin(2, timeout=3)
    pool.receive(2, "G0")
    waited = call(first, "receive", timeout=0.5)
    again = call(first, "receive", timeout=0.5)
    pushed = pool.ended()
    (hub, _) = pool.forget("G1")
    pool.deliver(3, "G0")
    time.sleep(max(0.0, since + frozen - time.monotonic()))
    stuck.kill(signal.SIGCONT)
    told = [call(rank, "receive", timeout=TIMEOUT) for rank in (hub, stuck)]
    held = [call(rank, "held").value for rank in (hub, stuck)]
    for version in (4, 5):
        pool.deliver(version, "G0")

    assert "ok" == pushed.kind
    assert ["G1"] == list(pushed.value.failed)
    assert 3.0 <= pushed.seconds < 6.0
    assert ["TimedOutError"] * 2 == [waited.kind, again.kind]
    assert 0.5 <= min(waited.seconds, again.seconds)
    assert max(waited.seconds, again.seconds) < 1.0
    assert ["PeerError"] * 2 == [each.kind for each in told]
    assert all("removed from the pool" in each.value for each in told)
    assert [Held(1, 1)] * 2 == held
    assert pool.close() + driven.close(hub, stuck) < 5.0


@slow_on_nccl
def test_a_start_without_one_of_the_replicas_ends_in_time_and_says_who_is_there(
    engine: Engine, processes: Processes, address: str
) -> None:
    pool = Pool(processes, address, numel=MIB)
    pool.join("G0", ranks=2)
    for trainer in pool.trainers:
        ask(trainer, "wait_for_replicas", count=2, timeout=3)
    missed = [trainer.hear() for trainer in pool.trainers]
    pool.deliver(1, "G0")

    assert ["TimedOutError"] * 2 == [each.kind for each in missed]
    assert all("2 replicas; 1 joined: G0" in each.value for each in missed)
    assert all(3.0 <= each.seconds < 6.0 for each in missed)
    assert pool.close() < 5.0


def test_a_start_without_a_trainer_rank_ends_in_time_and_names_it(
    processes: Processes, address: str
) -> None:
    leader = processes.start(driven.trainer, address, 0, 3, MIB)
    assert "open" == leader.hear()
    ranks = [
        processes.start(driven.generator, address, "G0", rank, 2, MIB)
        for rank in range(2)
    ]
    second = processes.start(driven.trainer, address, 1, 3, MIB)
    for child in (second, *ranks):
        assert "open" == child.hear()
    for trainer in (leader, second):
        ask(trainer, "wait_for_replicas", count=1, timeout=1)
    missed = [trainer.hear() for trainer in (leader, second)]
    closed = driven.close(leader, second, *ranks)

    wanted = "0 joined: none; trainer ranks [2] have not joined; still joining: G0"
    assert ["TimedOutError"] * 2 == [each.kind for each in missed]
    assert all(wanted in each.value for each in missed), missed
    assert all(1.0 <= each.seconds < 1.0 + GRACE for each in missed)
    assert closed < 5.0


def test_a_leader_killed_half_way_leaves_every_replica_whole_for_other_trainers(
    engine: Engine, processes: Processes, address: str
) -> None:
    pool = Pool(processes, address, numel=mebibytes(64, engine))
    pool.join("G0")
    pool.join("pair", ranks=2, mode="swap")
    (watch,) = pool.join("watch", mode="inplace")
    pool.deliver(1, "G0", "pair", "watch")
    leader, other = pool.trainers
    _arm(watch, leader, signal.SIGKILL)
    pool.begin(2)
    watched = watch.hear()
    outcome = pool.ended(but=leader)
    if outcome.kind == "ok":  # killed when all of it was put: the next push tells
        ask(other, "push", version=3, timeout=TIMEOUT)
        outcome = other.hear()
    if watched.kind == "ok":
        watched = _told(watch)
    ranks = pool.ranks("G0", "pair")
    told = [_told(rank) for rank in ranks]
    held = [call(rank, "held").value for rank in ranks]
    pushed = pool.succeed(4, leader)

    assert "PeerError" == outcome.kind
    assert "trainer rank 0" in outcome.value
    assert outcome.seconds < GRACE
    assert ["PeerError"] * 4 == [each.kind for each in (*told, watched)]
    assert all("trainer rank 0" in each.value for each in told)
    assert max(each.seconds for each in told) < GRACE
    assert set(held) <= {Held(1, 1), Held(2, 2)}
    assert held[1] == held[2]
    assert SENTINEL not in {each.value for each in held}
    assert {"G0", "pair", "watch"} == set(pushed.value.delivered)
    assert pool.close() < 5.0
