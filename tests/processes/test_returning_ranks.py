"""Ranks of a replica that are replaced, or belong to another start of it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import ask, call, close
from tests.processes.engines import slow_on_nccl
from tests.processes.returning import (
    Seen,
    call_all,
    deliver,
    generator,
    start_generators,
    start_trainers,
    started,
    trainer,
    values,
)

if TYPE_CHECKING:
    from tests.processes.harness import Processes

pytestmark = [pytest.mark.usefixtures("engine"), slow_on_nccl]

NUMEL = 4096


@pytest.mark.parametrize("lost", [0, 1])
def test_the_ranks_that_are_left_wait_for_the_one_that_replaces_a_dead_one(
    processes: Processes, address: str, lost: int
) -> None:
    ranks = start_generators(processes, address, NUMEL, ranks=2)
    trainers = start_trainers(processes, address, NUMEL)
    assert ["open"] * 2 == [rank.hear() for rank in ranks]
    delivered = [deliver(trainers, ranks, value=1, version=5)]
    ranks[lost].kill()
    ranks[lost].join()
    told = call(ranks[1 - lost], "receive", timeout=10)
    kept = call(ranks[1 - lost], "see").value
    ask(ranks[1 - lost], "receive", timeout=20)
    ranks[lost] = processes.start(generator, address, "g", lost, 2, NUMEL)
    assert "open" == ranks[lost].hear()
    call_all(trainers, "wait_for_replicas", count=1)
    member = call(trainers[0], "membership").value.replicas["g"]
    ask(ranks[lost], "receive", timeout=20)
    call_all(trainers, "push", value=2)
    again = [rank.hear().value.version for rank in ranks]
    delivered += [deliver(trainers, ranks, value=3)]
    seen = values(call_all(ranks, "see"))
    close(*ranks, *trainers)

    assert "PeerError" == told.kind
    assert Seen(5, 0, 1) == kept
    assert None is member.version
    assert [6, 6] == again
    assert [[(0, 5)] * 2, [(0, 7)] * 2] == delivered
    assert [Seen(7, 0, 3)] * 2 == seen


def test_a_rank_that_dies_before_its_replica_is_complete_may_be_replaced(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    first, stray = [
        processes.start(generator, address, "g", rank, 3, NUMEL) for rank in (0, 1)
    ]
    assert ["open"] * 2 == [first.hear(), stray.hear()]
    stray.kill()
    stray.join()
    told = call(first, "receive", timeout=10)
    ask(first, "receive", timeout=20)
    others = [
        processes.start(generator, address, "g", rank, 3, NUMEL) for rank in (1, 2)
    ]
    assert ["open"] * 2 == [rank.hear() for rank in others]
    for rank in others:
        ask(rank, "receive", timeout=20)
    call_all(trainers, "wait_for_replicas", count=1)
    call_all(trainers, "push", value=1)
    received = [rank.hear().value.version for rank in (first, *others)]
    close(first, *others, *trainers)

    assert ("PeerError", "rank 1 of replica 'g' failed") == (told.kind, told.value[:28])
    assert [1] * 3 == received


def _run(count: int) -> dict[str, str]:
    """The environment of a rank as torchrun starts it, for so many times before."""
    return {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": str(count)}


def test_a_rank_of_another_start_is_refused_and_both_are_named(
    processes: Processes, address: str
) -> None:
    leader = processes.start(started, _run(1), trainer, address, 0, 2, NUMEL)
    leader.hear()
    trainer_left = processes.start(started, _run(0), trainer, address, 1, 2, NUMEL)
    hub = processes.start(started, _run(4), generator, address, "g", 0, 2, NUMEL)
    hub.hear()
    rank_left = processes.start(started, _run(3), generator, address, "g", 1, 2, NUMEL)
    refusals = [trainer_left.refusal(), rank_left.refusal()]
    close(hub, leader)

    what = "its incarnation (run and restart count of torchrun) is"
    assert f"{what} 'run#0', that of trainer rank 0 is 'run#1'" in refusals[0]
    assert f"{what} 'run#3', that of rank 0 is 'run#4'" in refusals[1]
    assert all("PlanError" in refusal for refusal in refusals)


def test_a_frozen_generator_is_told_once_and_joins_again(
    processes: Processes, address: str
) -> None:
    lease = 0.5
    ranks = start_generators(processes, address, NUMEL, "staged", lease)
    trainers = start_trainers(processes, address, NUMEL)
    ranks[0].hear()
    delivered = deliver(trainers, ranks, value=1)
    ranks[0].kill(signal.SIGSTOP)
    event = call(trainers[0], "event", kind="failed")
    ranks[0].kill(signal.SIGCONT)
    told = call(ranks[0], "receive", timeout=10)
    delivered += deliver(trainers, ranks, value=2)
    close(*ranks, *trainers)

    assert "gave no sign of life for 0.5 s" in event.value
    assert "PeerError" == told.kind
    assert [(0, 1), (0, 2)] == delivered


def test_a_waiting_rank_0_gives_way_to_another_process(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    left = processes.start(generator, address, "g", 0, 2, NUMEL)
    assert "open" == left.hear()
    ask(left, "receive", timeout=20)
    later = processes.start(generator, address, "g", 0, 2, NUMEL)
    assert "open" == later.hear()
    told = [left.hear(), call(left, "receive", timeout=5)]
    other = processes.start(generator, address, "g", 1, 2, NUMEL)
    assert "open" == other.hear()
    delivered = deliver(trainers, [later, other], value=1)
    close(left, later, other, *trainers)

    message = "another process has become rank 0 of replica 'g'"
    assert [("FencedError", message)] * 2 == [outcome[:2] for outcome in told]
    assert [(0, 1)] * 2 == delivered


def test_a_rank_that_a_former_hub_refuses_waits_for_that_of_its_own_start(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    left = processes.start(generator, address, "g", 0, 2, NUMEL, "swap")
    assert "open" == left.hear()
    other = processes.start(generator, address, "g", 1, 2, NUMEL, "staged")
    later = processes.start(generator, address, "g", 0, 2, NUMEL, "staged")
    assert ["open"] * 2 == [later.hear(), other.hear()]
    delivered = deliver(trainers, [later, other], value=1)
    told = call(left, "receive", timeout=5)
    close(left, later, other, *trainers)

    assert "FencedError" == told.kind
    assert [(0, 1)] * 2 == delivered
