"""The barrier."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import at_once, job, rank, world
from weightsync import testing


def arrivals(backend: str, asynchronous: bool) -> list[bool]:
    """Each rank in turn comes last: return who was there when the barrier was over."""
    with job(backend), at_once():
        store = dist.distributed_c10d._get_default_store()
        found = []
        for last in range(world()):
            others = [f"{last}/{each}" for each in range(world()) if each != last]
            if rank() == last:
                store.wait(others)
            store.set(f"{last}/{rank()}", "here")
            work = dist.barrier(async_op=asynchronous)
            if work is not None:
                work.wait()
            torch.cuda.synchronize()
            found.append(store.check([*others, f"{last}/{last}"]))
        leave(store)
        return found


def leave(store: dist.Store) -> None:
    """Let rank 0, which has the store, stay until nobody needs it."""
    store.set(f"gone/{rank()}", "")
    if rank() == 0:
        store.wait([f"gone/{each}" for each in range(world())])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_barrier_is_over_when_all_have_come(backend: str, asynchronous: bool) -> None:
    found = testing.emulated(arrivals, 3, args=[backend, asynchronous])

    assert [[True] * 3] * 3 == found
