"""Versions never go back unnoticed: they continue, or a new epoch begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import ask, call, close
from tests.processes.engines import slow_on_nccl
from tests.processes.returning import (
    Seen,
    call_all,
    deliver,
    kinds,
    start_generators,
    start_trainers,
    trainer,
    values,
)
from tests.processes.test_returning import end

if TYPE_CHECKING:
    from tests.processes.harness import Processes

pytestmark = [pytest.mark.usefixtures("engine"), slow_on_nccl]

NUMEL = 4096


def test_an_older_checkpoint_is_refused_and_accepted_in_a_new_epoch(
    processes: Processes, address: str
) -> None:
    generators = start_generators(processes, address, NUMEL, ranks=2)
    trainers = start_trainers(processes, address, NUMEL)
    assert ["open"] * 2 == [rank.hear() for rank in generators]
    delivered = [deliver(trainers, generators, value=10, version=40)]
    end(trainers, generators, "close")

    trainers = start_trainers(processes, address, NUMEL)
    for child in generators:
        ask(child, "receive", timeout=20)
    call_all(trainers, "wait_for_replicas", count=1)
    refused = call_all(trainers, "push", value=11, version=31)
    member = call(trainers[0], "membership").value
    close(*trainers)
    told = [child.hear() for child in generators]
    kept = values(call_all(generators, "see"))

    trainers = start_trainers(processes, address, NUMEL, epoch=1)
    delivered += [deliver(trainers, generators, value=12, version=31)]
    delivered += [deliver(trainers, generators, value=13)]
    seen = values(call_all(generators, "see"))
    new = call(trainers[0], "membership").value
    close(*generators, *trainers)

    message = (
        "version 31 does not increase: replica 'g' held version 40 of epoch 0 when it "
        "joined; push a version above it, or start the trainers with epoch=1 to count "
        "anew"
    )
    assert [("PlanError", message)] * 2 == [refusal[:2] for refusal in refused]
    assert {"ClosedError"} == kinds(told)
    assert [[(0, 40)] * 2, [(1, 31)] * 2, [(1, 32)] * 2] == delivered
    assert [Seen(40, 0, 10)] * 2 + [Seen(32, 1, 13)] * 2 == kept + seen
    assert (40, 0, 40) == (member.version, member.epoch, member.replicas["g"].version)
    assert (32, 1, 1) == (new.version, new.epoch, new.replicas["g"].epoch)


def test_a_replica_of_a_later_epoch_is_refused_by_trainers_of_an_earlier(
    processes: Processes, address: str
) -> None:
    (generator,) = start_generators(processes, address, NUMEL)
    trainers = start_trainers(processes, address, NUMEL, epoch=3)
    generator.hear()
    deliver(trainers, [generator], value=10, version=7)
    end(trainers, [generator], "close")

    trainers = start_trainers(processes, address, NUMEL, epoch=2)
    refused = call(generator, "receive", timeout=10)
    event = call(trainers[1], "last_event").value
    end(trainers, [], "close")

    # Without an epoch the trainers go on in that of their replicas.
    trainers = start_trainers(processes, address, NUMEL)
    delivered = deliver(trainers, [generator], value=11)
    close(generator, *trainers)

    message = (
        "replica 'g' holds version 7 of epoch 3, later than epoch 2 of the trainers; "
        "start them with epoch=3 to go on in it, or a higher one"
    )
    assert ("PlanError", message) == refused[:2]
    assert f"replica 'g' failed: {message}" == event
    assert [(3, 8)] == delivered


def test_trainer_ranks_of_different_epochs_are_refused(
    processes: Processes, address: str
) -> None:
    first = processes.start(trainer, address, 0, 2, NUMEL, 2)
    first.hear()
    second = processes.start(trainer, address, 1, 2, NUMEL, 1)
    with pytest.raises(Exception, match="PlanError") as caught:
        second.hear()
    close(first)

    message = "trainer rank 1 was started with epoch=1, and rank 0 with epoch=2"
    assert message in str(caught.value)


def test_a_resumed_trainer_publishes_its_weights_without_a_training_step(
    processes: Processes, address: str
) -> None:
    generators = start_generators(processes, address, NUMEL)
    trainers = start_trainers(processes, address, NUMEL)
    generators[0].hear()
    deliver(trainers, generators, value=10)
    end(trainers, generators, "kill")
    ask(generators[0], "receive", timeout=20)
    trainers = start_trainers(processes, address, NUMEL)
    call_all(trainers, "wait_for_replicas", count=1)
    reports = values(call_all(trainers, "push", value=10))
    update = generators[0].hear().value
    close(*generators, *trainers)

    assert [2, 2] == [report.version for report in reports]
    assert 2 == update.version
