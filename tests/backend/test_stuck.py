"""What nobody sees at a call: errors behind it, and calls that do not come back."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final

import pytest
import torch.distributed as dist

from tests.backend.ending import BOUND, OURS, ended_in_time, mine, until_over
from tests.conformance.endings import begun, in_turn, meeting, stay
from tests.conformance.group import job, rank
from tests.conformance.members import leave_together, quiet
from tests.conformance.windows import board, numbers, raised
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

LIMIT: Final = timedelta(seconds=2)
LONG: Final = timedelta(seconds=25)


def error_kind() -> str:
    return str(mine().get_error()).rpartition(".")[2]


def fails_behind_the_call(way: str) -> list[Any]:
    number, common = begun(OURS, timeout=LONG), board()
    if rank() == 1:
        stay()
        return []
    before = error_kind()
    work: Any = dist.all_reduce(number, async_op=True)
    began = time.monotonic()
    if way == "stream":
        until_over(work)
    error = raised(work.wait, *([LONG] if way == "host" else []))
    took = time.monotonic() - began
    kinds = [before, error_kind()]
    ends = [work.is_completed(), work.is_success()]
    ends += [bool(raised(dist.all_reduce, number)), ended_in_time()]
    common.set("done", "")
    return [error, took < BOUND, kinds, ends]


@pytest.mark.parametrize("way", ["host", "stream"])
@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        (6, "remote process exited", "REMOTE_ERROR"),
        (2, "unhandled system error", "COMM_ERROR"),
    ],
)
def test_an_error_of_nccl_behind_the_call_ends_what_is_pending(
    way: str, code: int, words: str, kind: str
) -> None:
    (error, *found), other = testing.emulated(
        fails_behind_the_call,
        2,
        args=[way],
        faults=f"all_reduce@rank=0,n=2:error={code}",
    )

    assert [] == other
    assert [True, ["SUCCESS", kind], [True, False, True, True]] == found
    assert "DistBackendError" in error
    assert words in error


def is_kept_by_nccl(aborts: bool) -> list[Any]:
    number, common = begun(OURS, timeout=LONG if aborts else LIMIT), board()
    if rank() == 1:
        stay()
        return []
    timer = threading.Timer(0.3, mine().abort)
    if aborts:
        timer.start()
    began = time.monotonic()
    error = raised(dist.all_reduce, number)
    took = time.monotonic() - began
    found = [took < BOUND, ended_in_time(), number.tolist()]
    common.set("done", "")
    return [error, *found]


@pytest.mark.parametrize(
    ("aborts", "words"),
    [
        (False, "all_reduce timed out: NCCL did not take it, on rank 0"),
        (True, "the process group was aborted"),
    ],
    ids=["timeout", "abort"],
)
def test_a_call_that_nccl_does_not_end_is_ended(aborts: bool, words: str) -> None:
    (error, *found), other = testing.emulated(
        is_kept_by_nccl,
        2,
        args=[aborts],
        faults="all_reduce@rank=0,n=2:block",
    )

    assert [] == other
    assert [True, True, [2]] == found
    assert words in error


def is_aborted_while_it_connects(caller: int) -> list[Any]:
    quiet()
    store = meeting()
    options = {"timeout": LONG, "device_id": None, **in_turn(store, 0)}
    found: list[Any] = []
    with job(OURS, **options):
        if rank() == caller:
            number = numbers(1, 1).to("cuda")
            timer = threading.Timer(0.3, mine().abort)
            timer.start()
            began = time.monotonic()
            found.append(raised(dist.all_reduce, number))
            found.append(time.monotonic() - began < BOUND)
            timer.join()
            found += number.tolist()
    leave_together(2, store)
    return found


@pytest.mark.parametrize("caller", [0, 1], ids=["in nccl", "in the store"])
def test_an_abort_ends_the_wait_for_those_who_do_not_connect(caller: int) -> None:
    found = testing.emulated(is_aborted_while_it_connects, 2, args=[caller])

    error, *rest = found[caller]
    assert [] == found[1 - caller]
    assert [True, 1] == rest
    assert "the process group was aborted" in error
