"""Groups that are aborted, destroyed or left by a rank that dies."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import (
    UNHANDLED,
    be_done,
    begun,
    in_turn,
    meeting,
    stay,
)
from tests.conformance.group import job, rank
from tests.conformance.members import exchanged, expected
from tests.conformance.windows import numbers, raised
from weightsync import testing

NEEDS = "failure"


def aborts(backend: str, pending: str) -> list[Any]:
    number = begun(backend)
    group: Any = dist.group.WORLD
    if rank() == 1:
        stay()
        return []
    if pending == "recv":
        work: Any = dist.irecv(number, 1)
    else:
        work = dist.all_reduce(number, async_op=True)
    group.abort()
    # What it says is up to the backend: it has to end.
    raised(work.wait)
    torch.cuda.synchronize()
    error = raised(dist.all_reduce, number)
    be_done()
    return [work.is_completed(), bool(error)]


@pytest.mark.parametrize("pending", ["all_reduce", "recv"])
def test_an_abort_ends_what_is_pending_and_the_group(
    backend: str, pending: str
) -> None:
    found = testing.emulated(aborts, 2, args=[backend, pending])

    assert [[True, True], []] == found


def waits_after_its_group(backend: str) -> list[bool]:
    number = begun(backend)
    if rank() == 1:
        stay()
        return []
    work: Any = dist.all_reduce(number, async_op=True)
    be_done()
    dist.distributed_c10d._abort_process_group()
    raised(work.wait)
    torch.cuda.synchronize()
    return [dist.is_initialized()]


def test_work_outlives_its_aborted_group(backend: str) -> None:
    found = testing.emulated(waits_after_its_group, 2, args=[backend])

    assert [[False], []] == found


def aborts_all(backend: str) -> list[Any]:
    store = meeting()
    device = begun(backend, **in_turn(store, 0)).device
    part = dist.new_group([0, 1])
    exchanged(device, part)
    for group in (part, None):
        dist.all_reduce(numbers(0, 1).to(device), group=group, async_op=True)
        torch.cuda.synchronize()
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    with job(backend, **in_turn(store, 1)):
        return exchanged(device)


def test_after_an_abort_a_process_joins_a_new_group(backend: str) -> None:
    found = testing.emulated(aborts_all, 2, args=[backend])

    assert [expected([0, 1], process) for process in range(2)] == found


def destroys_with_work(backend: str) -> list[Any]:
    found, store = [], meeting()
    for turn in range(3):
        with job(backend, **in_turn(store, turn)) as device:
            number = numbers(turn, 1).to(device)
            dist.all_reduce(number, async_op=True)
        found += number.tolist()
    return [*found, dist.is_initialized()]


def test_a_destroyed_group_finishes_its_work_and_another_one_follows(
    backend: str,
) -> None:
    found = testing.emulated(
        destroys_with_work, 2, args=[backend], faults="all_reduce:delay=0.1"
    )

    assert [[0, 2, 4, False]] * 2 == found


def loses_a_rank(backend: str) -> list[Any]:
    number = begun(backend, UNHANDLED)
    work: Any = dist.all_reduce(number, async_op=True)
    error = raised(work.wait, timedelta(seconds=1))
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    return [bool(error)]


def test_a_rank_that_is_killed_in_a_collective_is_noticed_in_time(
    backend: str,
) -> None:
    first, killed = testing.outcomes(
        loses_a_rank, 2, args=[backend], faults="all_reduce@rank=1,n=2:kill"
    )

    assert -signal.SIGKILL == killed.exit_code
    assert [True] == first.result


def waits_for_the_dead(backend: str) -> None:
    number = begun(backend)
    dist.all_reduce(number)
    torch.cuda.synchronize()


def test_a_collective_with_a_dead_rank_hangs_until_its_time_is_over(
    backend: str,
) -> None:
    first, killed = testing.outcomes(
        *(waits_for_the_dead, 2),
        args=[backend],
        faults="all_reduce@rank=1,n=2:kill",
        hang_seconds=1,
    )

    assert -signal.SIGKILL == killed.exit_code
    assert first.hung
    assert "is dead" in first.output
