"""What a group and its work say of themselves: counts, times, completion."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import torch.distributed as dist

from tests.conformance.group import job
from tests.conformance.windows import numbers, raised
from weightsync import testing

pytestmark = testing.requires_emulator()

OURS: Final = "weightsync-nccl2"


def mine() -> Any:
    """Return our part of the default group."""
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cuda"))


def until_over(work: Any) -> None:
    """Wait on the host, for an operation that has a time of its own."""
    while not work.is_completed():
        time.sleep(0.01)


def counts() -> list[Any]:
    with job(OURS) as device:
        part, number = mine(), numbers(1, 1).to(device)
        before = part._get_sequence_number_for_group()
        for _ in range(3):
            dist.all_reduce(number)
        return [before, part._get_sequence_number_for_group()]


def test_collectives_are_counted() -> None:
    assert [[0, 3]] * 2 == testing.emulated(counts, 2)


def takes_the_time() -> list[Any]:
    with job(OURS) as device:
        part, number = mine(), numbers(1, 1).to(device)
        untimed: Any = dist.all_reduce(number, async_op=True)
        until_over(untimed)
        error = raised(untimed._get_duration)
        part._enable_collectives_timing()
        work: Any = dist.all_reduce(number, async_op=True)
        early = raised(work._get_duration)
        until_over(work)
        milliseconds = work._get_duration()
        return [
            "_enable_collectives_timing" in error,
            "is not finished" in early,
            500 <= milliseconds < 20_000,
        ]


def test_a_duration_is_known_if_it_was_asked_for() -> None:
    found = testing.emulated(takes_the_time, 1, faults="all_reduce@n=2:delay=0.5")

    assert [[True] * 3] == found


def is_recorded() -> list[Any]:
    """Let torch's own recorder, which a completion hook feeds, say what ended."""
    import pickle

    from torch._C import _distributed_c10d as c10d

    with job(OURS) as device:
        number = numbers(1, 1).to(device)
        for _ in range(3):
            until_over(dist.all_reduce(number, async_op=True))
        part = mine()
        text = c10d._dump_fr_trace(includeStackTraces=False, backend=OURS)
        entries = pickle.loads(text)["entries"]
        states = [entry["state"] for entry in entries]
        return [part.supports_abort_hooks, states[:3]]


if hasattr(dist.ProcessGroup, "supports_abort_hooks"):  # From torch 2.15 on.

    def test_an_operation_that_ends_well_is_reported_as_completed() -> None:
        found = testing.emulated(is_recorded, 2)

        assert [[True, ["completed"] * 3]] * 2 == found
