"""New ranks that come before their rank 0, while that of a former start is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import ask, call, close
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
    from collections.abc import Callable
    from pathlib import Path

    from tests.processes.harness import Child, Processes

NUMEL = 4096


@pytest.fixture
def file_address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def _of(start: str) -> dict[str, str]:
    """The environment of a rank that belongs to a start."""
    return {"WEIGHTSYNC_INCARNATION": start}


STARTS = {
    "the same": ("", "", {}),
    "another incarnation": ("a", "b", {}),
    "a later epoch": ("", "", {"epoch": 1}),
}


@pytest.mark.parametrize(
    "case",
    [
        "the same",
        pytest.param("another incarnation", marks=pytest.mark.slow),
        "a later epoch",
    ],
)
def test_a_trainer_rank_that_comes_before_its_rank_0_waits_for_it(
    case: str, processes: Processes, file_address: str
) -> None:
    before, after, options = STARTS[case]
    epoch = options.get("epoch")

    def start(incarnation: str, rank: int, epoch: int | None = None) -> Child:
        arguments = (trainer, file_address, rank, 2, NUMEL, epoch)
        return processes.start(started, _of(incarnation), *arguments)

    old = [start(before, rank) for rank in (0, 1)]
    assert ["open"] * 2 == [child.hear() for child in old]
    ranks = start_generators(processes, file_address, NUMEL)
    assert "open" == ranks[0].hear()
    delivered = deliver(old, ranks, value=1)
    second = start(after, 1, epoch)
    with pytest.raises(TimeoutError):
        second.hear(1.5)
    first = start(after, 0, epoch)
    assert ["open"] * 2 == [first.hear(), second.hear()]
    told = call(ranks[0], "receive", timeout=10)
    delivered += deliver([first, second], ranks, value=2)
    refused = call_all(old, "push", value=9, timeout=5)
    close(*ranks, first, second, *old)

    assert ["FencedError"] * 3 == [outcome.kind for outcome in (told, *refused)]
    assert [(0, 1), (0, 2) if epoch is None else (1, 1)] == delivered


def _replica(processes: Processes, address: str) -> Callable[[str, int], Child]:
    def start(incarnation: str, rank: int) -> Child:
        arguments = (generator, address, "g", rank, 2, NUMEL)
        return processes.start(started, _of(incarnation), *arguments)

    return start


def test_a_rank_0_whose_place_is_taken_in_the_pool_is_told_so_soon(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    start = _replica(processes, address)
    old, new = start("", 0), start("", 1)
    assert ["open"] * 2 == [old.hear(), new.hear()]
    call_all(trainers, "wait_for_replicas", count=1)
    later = start("", 0)
    assert "open" == later.hear()
    told = call(later, "receive", timeout=20)
    delivered = deliver(trainers, [old, new], value=1)
    close(old, new, later, *trainers)

    assert ("PlanError", True) == (told.kind, told.seconds < 10)
    assert "replica 'g' is in the pool already" in told.value
    assert [(0, 1)] * 2 == delivered


def test_ranks_of_two_starts_form_no_replica_where_their_launcher_tells_them_apart(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    start = _replica(processes, address)
    left = start("a", 0)
    assert "open" == left.hear()
    ask(left, "receive", timeout=20)
    second = start("b", 1)
    with pytest.raises(TimeoutError):
        second.hear(1.5)
    first = start("b", 0)
    assert ["open"] * 2 == [first.hear(), second.hear()]
    told = left.hear()
    delivered = deliver(trainers, [first, second], value=1)
    seen = values(call_all([first, second], "see"))
    close(left, first, second, *trainers)

    assert "FencedError" == told.kind
    assert [(0, 1)] * 2 == delivered
    assert [Seen(1, 0, 1)] * 2 == seen


def test_a_rank_whose_place_is_taken_comes_in_when_that_process_is_gone(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL)
    start = _replica(processes, address)
    first, second = start("", 0), start("", 1)
    assert ["open"] * 2 == [first.hear(), second.hear()]
    delivered = deliver(trainers, [first, second], value=1)
    third = start("", 1)
    with pytest.raises(TimeoutError):
        third.hear(2.5)
    second.kill()
    told = call(first, "receive", timeout=10)
    ask(first, "receive", timeout=20)
    assert "open" == third.hear()
    ask(third, "receive", timeout=20)
    call_all(trainers, "wait_for_replicas", count=1)
    call_all(trainers, "push", value=2)
    received = [child.hear().value.version for child in (first, third)]
    close(first, third, *trainers)

    assert "PeerError" == told.kind
    assert [(0, 1)] * 2 == delivered
    assert [2, 2] == received
