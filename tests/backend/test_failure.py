"""Operations that take too long, ranks that die, and groups that end in between."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.backend.ending import BOUND, OURS, mine, options, seconds_of, until_over
from tests.conformance.endings import begun, in_turn, meeting, stay
from tests.conformance.group import job, rank
from tests.conformance.windows import board, numbers, raised
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

LIMIT: Final = timedelta(seconds=2)


# --- timeouts ---


def starts(way: str, number: torch.Tensor) -> Any:
    if way == "setter":
        dist.distributed_c10d._set_pg_timeout(LIMIT)
    if way == "call":
        asked = dist.AllreduceOptions()
        asked.timeout = LIMIT
        asked.asyncOp = True
        return mine().allreduce([number], asked)
    return dist.all_reduce(number, async_op=True)


OPENED: Final = {
    "group": {"timeout": LIMIT},
    "options": {"_timeout": LIMIT},
    "blocking": {"_timeout": LIMIT, "blocking_wait": True},
}


def misses(way: str) -> list[Any]:
    given: dict[str, Any] = dict(OPENED.get(way, {}))
    if way in ("options", "blocking"):
        # What init_process_group takes where it is told nothing.
        given = {
            "pg_options": options(**given),
            "timeout": dist.constants.default_pg_timeout,
        }
    number, common = begun(OURS, **given), board()
    if rank() == 2:
        stay()
        return []
    began = time.monotonic()
    work = starts(way, number)
    if way in ("wait", "blocking"):
        error = raised(work.wait, *([LIMIT] if way == "wait" else []))
    else:
        until_over(work)
        error = raised(work.wait)
    took = time.monotonic() - began
    torch.cuda.synchronize()
    group: Any = dist.group.WORLD
    ends = [seconds_of(group.abort), seconds_of(dist.destroy_process_group)]
    report = [
        "timed out" in error and "all_reduce" in error and f"rank {rank()} of" in error,
        1.9 < took < BOUND,
        max(ends) < BOUND,
        [work.is_completed(), work.is_success(), bool(raised(work.wait))],
    ]
    common.set("done", "")
    return report


@pytest.mark.parametrize(
    "way", ["group", "options", "blocking", "setter", "call", "wait"]
)
def test_an_operation_ends_in_error_whichever_way_its_time_was_given(way: str) -> None:
    found = testing.emulated(misses, 3, args=[way])

    expected = [True, True, True, [True, False, True]]
    assert [expected, expected, []] == found


def contradicts() -> str:
    given = options(_timeout=timedelta(seconds=5))
    return raised(lambda: job(OURS, pg_options=given).__enter__())


def test_two_timeouts_that_differ_are_an_error() -> None:
    (said,) = testing.emulated(contradicts, 1)

    assert "two timeouts: 30 s by its call, 5 s by its options" in said


def is_late(extension: float) -> list[Any]:
    with job(OURS, timeout=timedelta(seconds=1)) as device:
        mine()._add_ephemeral_timeout(timedelta(seconds=extension))
        number = numbers(1, 1).to(device)
        works: list[Any] = [dist.all_reduce(number, async_op=True) for _ in range(2)]
        for work in works:
            until_over(work)
        works.append(dist.all_reduce(number, async_op=True))
        until_over(works[-1])
        return [[work.is_success(), work.timeout.total_seconds()] for work in works]


def test_a_timeout_is_longer_until_the_first_operation_after_that_is_done() -> None:
    found = testing.emulated(
        is_late, 2, args=[20], faults="all_reduce@n=1:delay=2", timeout=60
    )

    assert [[[True, 21], [True, 21], [True, 1]]] * 2 == found


# --- the end ---


def loses_a_rank() -> list[Any]:
    store = meeting()
    number = begun(OURS, timeout=LIMIT, **in_turn(store, 0))
    began = time.monotonic()
    work: Any = dist.all_reduce(number, async_op=True)
    until_over(work)
    took = time.monotonic() - began
    error_kind = str(mine().get_error()).rpartition(".")[2]
    ends = [
        seconds_of(dist.distributed_c10d._abort_process_group),
        seconds_of(torch.cuda.synchronize),
    ]
    with job(OURS, **in_turn(store, 1) | {"world_size": 2}) as device:
        number = numbers(rank() + 1, 1).to(device)
        dist.all_reduce(number)
        total = number.tolist()
    return [took < BOUND, error_kind, max(ends) < BOUND, work.is_success(), total]


def test_survivors_of_a_killed_rank_raise_in_time_and_go_on_together() -> None:
    *survivors, killed = testing.outcomes(
        loses_a_rank, 3, faults="all_reduce@rank=2,n=2:kill"
    )

    assert -signal.SIGKILL == killed.exit_code
    assert [[True, "TIMEOUT", True, False, [3]]] * 2 == [
        each.result for each in survivors
    ], survivors


def stays_behind() -> list[bool]:
    number, common = begun(OURS), board()
    if rank() == 2:
        common.set("gone", "")
        signal.raise_signal(signal.SIGKILL)
    common.wait(["gone"])
    took = seconds_of(dist.destroy_process_group)
    # The first rank serves the store of all.
    common.add("left", 1)
    while rank() == 0 and common.add("left", 0) < 2:
        time.sleep(0.01)
    return [took < BOUND, [3] == number.tolist()]


def test_a_group_is_destroyed_in_time_though_a_rank_left_without_doing_so() -> None:
    *stayed, killed = testing.outcomes(stays_behind, 3)

    assert -signal.SIGKILL == killed.exit_code
    assert [[True, True]] * 2 == [each.result for each in stayed], stayed


def ends_twice(first: str, second: str) -> list[Any]:
    number, common = begun(OURS), board()
    if rank() == 1:
        stay()
        return []
    if first == "abort":
        dist.all_reduce(number, async_op=True)
    group, part = dist.group.WORLD, mine()
    found = [seconds_of(getattr(part, name)) < BOUND for name in (first, second, first)]
    torch.cuda.synchronize()
    error = raised(lambda: dist.all_reduce(number, group=group))
    found.append("aborted" in error or "shut down" in error)
    dist.destroy_process_group()
    common.set("done", "")
    return found


@pytest.mark.parametrize("second", ["abort", "shutdown"])
@pytest.mark.parametrize("first", ["abort", "shutdown"])
def test_a_group_may_be_ended_again_and_again(first: str, second: str) -> None:
    found = testing.emulated(ends_twice, 2, args=[first, second])

    assert [[True] * 4, []] == found


def ends_from_another_thread(name: str) -> list[Any]:
    number, common = begun(OURS, timeout=timedelta(seconds=25)), board()
    if rank() == 1:
        stay()
        return []
    work: Any = dist.all_reduce(number, async_op=True)
    part = mine()
    threading.Timer(0.2, getattr(part, name)).start()
    began = time.monotonic()
    error = raised(work.wait, timedelta(seconds=20))
    took = time.monotonic() - began
    common.set("done", "")
    return [took < BOUND, "was aborted" in error]


def test_an_abort_from_another_thread_wakes_whoever_waits() -> None:
    found = testing.emulated(ends_from_another_thread, 2, args=["abort"])

    assert [[True, True], []] == found


def aborts_in_a_hook() -> list[Any]:
    number, common = begun(OURS, timeout=timedelta(seconds=1)), board()
    if rank() == 1:
        stay()
        return []
    part, calls, ended = mine(), [], threading.Event()

    def hook() -> None:
        calls.append(raised(part.abort))
        ended.set()

    part.register_abort_hook(1, hook)
    part.register_abort_hook(2, calls.clear)
    part.unregister_abort_hook(2)
    work: Any = dist.all_reduce(number, async_op=True)
    called = ended.wait(10)
    until_over(work)
    dist.destroy_process_group()
    common.set("done", "")
    return [called, calls]


def test_a_hook_runs_once_and_may_abort_the_group_itself() -> None:
    assert [[True, [""]], []] == testing.emulated(aborts_in_a_hook, 2)


def drops_tensors() -> list[Any]:
    """Destroy groups while their watchdogs drop tensors that Python knows."""
    store, sums = meeting(), []
    for turn in range(5):
        with job(OURS, **in_turn(store, turn)) as device:
            number = numbers(1, 1).to(device)
            for _ in range(40):
                # Nobody else keeps it, and its Python object goes with it.
                fresh: Any = torch.empty(1, dtype=torch.int32, device=device)
                fresh.mark = [fresh]
                dist.all_reduce(fresh, async_op=True)
                del fresh
            dist.all_reduce(number)
        gc.collect()
        sums += number.tolist()
    return sums


def test_a_group_is_destroyed_while_its_watchdog_drops_tensors() -> None:
    found = testing.emulated(
        drops_tensors, 2, faults="all_reduce@p=0.2,seed=1:delay=0.01"
    )

    assert [[2] * 5] * 2 == found


def is_dropped() -> list[int]:
    """Make groups that nobody ends, and forget them."""
    from weightsync import backend

    torch.cuda.set_device(0)
    found = []
    for _ in range(3):
        group = backend._C.ProcessGroupNccl(dist.HashStore(), 0, 1, options())
        number = numbers(5, 1).to("cuda")
        group.allreduce([number]).wait()
        del group
        gc.collect()
        found += number.tolist()
    return found


def test_a_group_that_nobody_ends_may_be_forgotten() -> None:
    assert [[5, 5, 5]] == testing.emulated(is_dropped, 1)


EXITS: Final = """
import torch, torch.distributed as dist, weightsync.backend
torch.cuda.set_device(0)
dist.init_process_group(
    "weightsync-nccl2", store=dist.HashStore(), rank=0, world_size=1
)
group = dist.group.WORLD._get_backend(torch.device("cuda"))
group.register_abort_hook(1, lambda: print("aborted", flush=True))
number = torch.tensor([1]).cuda()
works = [dist.all_reduce(number, async_op=True) for _ in range(3)]
print("leaving", flush=True)
"""


def test_a_process_that_exits_with_work_pending_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=dict(os.environ)
        | testing.environment(gpus=1, faults="all_reduce@n=2:stall")
        | {"CUDA_MODULE_LOADING": "LAZY"},
    )

    assert ["leaving", "aborted"] == done.stdout.split(), done.stderr
    assert 0 == done.returncode, done.stderr
