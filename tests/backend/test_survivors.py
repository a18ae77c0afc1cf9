"""Ranks that are killed or leave: the others form other groups, again and again."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT

from tests.backend.ending import BOUND, OURS, ended_in_time, seconds_of, until_gone
from tests.conformance.endings import begun, in_turn, meeting
from tests.conformance.group import rank
from tests.conformance.members import begin, form, leave_together
from tests.conformance.windows import numbers, raised
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

LIMIT: Final = timedelta(seconds=2)
LONG: Final = timedelta(seconds=20)


def total() -> int:
    """Return the sum of rank + 1 over the processes of the default group."""
    number = numbers(rank() + 1, 1).to(torch.device("cuda", rank()))
    dist.all_reduce(number)
    return int(number.item())


def goes_on(store: dist.Store) -> list[int]:
    """Form groups of processes 0 and 1, and of 1 alone; return the sums in them."""
    place = dist.PrefixStore("again/", store)
    begin(OURS, store=place, rank=rank(), world_size=2)
    found = [
        total()
        for generation, members in enumerate(([0, 1], [1], [0, 1]))
        if form(generation, members)
    ]
    leave_together(2, dist.PrefixStore("end/", store))
    dist.distributed_c10d._abort_process_group()
    return found


SUMS: Final = [[3, 3], [3, 2, 3]]


def loses_a_rank() -> list[Any]:
    store = meeting()
    number = begun(OURS, timeout=LIMIT, **in_turn(store, 0))
    work: Any = dist.all_reduce(number, async_op=True)
    error = raised(work.wait, LONG)
    found = ["timed out" in error, ended_in_time()]
    # What is known of the work does not go with its group.
    found += [work.is_completed(), work.is_success(), bool(raised(work.wait))]
    return [found, goes_on(store)]


def test_survivors_of_a_kill_end_their_group_and_form_others() -> None:
    *survivors, killed = testing.outcomes(
        loses_a_rank, 3, faults="all_reduce@rank=2,n=2:kill"
    )

    assert -signal.SIGKILL == killed.exit_code
    assert [[[True, True, True, False, True], sums] for sums in SUMS] == [
        each.result for each in survivors
    ], survivors


def is_left(way: str, end: str) -> list[Any]:
    store = meeting()
    begun(OURS, **in_turn(store, 0))
    if rank() == 2:
        store.set("process", str(os.getpid()))
        store.wait(["watched 0", "watched 1"])
        if way == "at once":
            os._exit(0)
        return []
    process = int(store.get("process"))
    store.set(f"watched {rank()}", "")
    until_gone(process)
    in_time = (
        ended_in_time()
        if end == "abort"
        else seconds_of(dist.destroy_process_group) < BOUND
    )
    return [in_time, goes_on(store)]


@pytest.mark.parametrize("end", ["abort", "destroy"])
@pytest.mark.parametrize("way", ["in order", "at once"])
def test_those_that_a_rank_left_without_a_word_end_their_group_and_form_others(
    way: str, end: str
) -> None:
    *stayed, left = testing.outcomes(is_left, 3, args=[way, end])

    assert 0 == left.exit_code
    assert [[True, sums] for sums in SUMS] == [each.result for each in stayed], stayed


def shrinks() -> list[Any]:
    store = meeting()
    number = begun(OURS, **in_turn(store, 0))
    store.set(f"process {rank()}", str(os.getpid()))
    found: list[Any] = []
    for lost in (3, 2):
        process = int(store.get(f"process {lost}"))
        work: Any = dist.all_reduce(number, async_op=True)
        until_gone(process)
        took = seconds_of(
            lambda lost=lost: dist.shrink_group([lost], None, SHRINK_ABORT)
        )
        found.append(
            [took < BOUND, bool(raised(work.wait)), work.is_success(), total()]
        )
    leave_together(2, dist.PrefixStore("end/", store))
    found.append(ended_in_time())
    return found


def test_a_group_shrinks_each_time_that_a_rank_is_killed() -> None:
    *survivors, third, fourth = testing.outcomes(
        shrinks,
        4,
        faults="all_reduce@rank=3,n=2:kill; all_reduce@rank=2,n=4:kill",
        hang_seconds=0,
    )

    assert [-signal.SIGKILL] * 2 == [third.exit_code, fourth.exit_code]
    assert [
        [[True, True, False, 6], [True, True, False, 3], True] for _ in range(2)
    ] == [each.result for each in survivors], survivors
