"""Replicas join and leave while several trainer ranks push."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call
from tests.processes.engines import slow_on_nccl
from tests.processes.pools import SECONDS, Pool, mebibytes

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes


@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_a_replica_that_comes_in_a_push_is_in_the_next_one_and_one_may_leave_in_a_push(
    engine: Engine, processes: Processes, address: str, size: int
) -> None:
    pool = Pool(processes, address, numel=mebibytes(size, engine))
    pool.join("G0", ranks=2)
    pool.deliver(1, "G0")
    ask(pool.trainers[0], "push", version=2, timeout=SECONDS)
    time.sleep(0.02)
    new = pool.start("G1", ranks=2, mode="swap")
    time.sleep(0.2)
    ask(pool.trainers[1], "push", version=2, timeout=SECONDS)
    pool.receive(2, "G0")
    second = pool.ended()
    opened = {rank.hear() for rank in new}
    waited = {call(t, "wait_for_replicas", count=2).kind for t in pool.trainers}
    late = [call(rank, "held").value for rank in new]
    if "G1" in second.value.delivered:
        pool.receive(2, "G1")
    third = pool.deliver(3, "G0", "G1")
    pool.begin(4)
    ended = driven.close(*pool.forget("G0"))
    pool.receive(4, "G1")
    fourth = pool.ended()
    fifth = pool.deliver(5, "G1")

    assert ({"open"}, {"ok"}) == (opened, waited)
    # It may have joined before trainer rank 1 has called, which begins the push.
    assert set(second.value.delivered) in ({"G0"}, {"G0", "G1"})
    assert {} == second.value.failed
    assert "G1" in second.value.delivered or [Held(None, SENTINEL)] * 2 == late
    assert {"G0", "G1"} == set(third.value.delivered)
    assert ({}, True) == (fourth.value.failed, "G1" in fourth.value.delivered)
    assert ["G1"] == list(fifth.value.replicas)
    assert ended < 5.0
    assert pool.close() < 5.0


def _look_until(ranks: list[Child], version: int) -> list[Held]:
    """What the ranks hold, again and again, until all have received a version."""
    seen: list[Held] = []
    for rank in ranks:
        while not seen or seen[-1].version != version:
            seen.append(call(rank, "held").value)
            received = call(rank, "receive", timeout=0.05)

            assert received.kind in {"ok", "TimedOutError"}
        seen.append(call(rank, "held").value)
    return seen


@slow_on_nccl
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_who_joins_late_is_not_ready_until_it_has_the_next_version_whole(
    processes: Processes, address: str, mode: str
) -> None:
    pool = Pool(processes, address, numel=8 * MIB)
    pool.join("G0")
    for version in (1, 2, 3):
        pool.deliver(version, "G0")
    late = pool.join("G1", ranks=2, mode=mode)
    before = [call(rank, "held").value for rank in late]
    waited = [call(rank, "receive", timeout=0.2) for rank in late]
    pool.begin(4)
    seen = [held for rank in late for held in _look_until([rank], 4)]
    pool.receive(4, "G0")

    assert [Held(None, SENTINEL)] * 2 == before
    assert ["TimedOutError"] * 2 == [each.kind for each in waited]
    assert {Held(None, SENTINEL), Held(4, 4)} >= set(seen)
    assert {"G0", "G1"} == set(pool.ended().value.delivered)
    assert pool.close() < 5.0
