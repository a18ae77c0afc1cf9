"""Groups of some ranks: who is not in one neither waits for it nor is needed."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, job, rank
from tests.conformance.members import exchanged, expected
from tests.conformance.windows import board
from weightsync import testing

BACKEND: Final = "weightsync-nccl2"
MEMBERS: Final = (1, 3)


def members_late() -> list[Any]:
    with job(BACKEND, device_id=None) as device:
        store = board()
        if rank() in MEMBERS:
            # Not before the others are through with making groups that are not theirs.
            store.wait(["0 went on", "2 went on"], TIMEOUT)
        outer, inner = dist.new_group([3, 1]), dist.new_group([3])
        if rank() not in MEMBERS:
            store.set(f"{rank()} went on", "")
        found = [exchanged(device, outer) if rank() in MEMBERS else None]
        found.append(exchanged(device, inner) if rank() == 3 else None)
        dist.barrier()
        return found


def test_who_is_not_in_a_group_does_not_wait_for_who_is() -> None:
    found = testing.emulated(members_late, 4)

    assert [[expected([1, 3], each), expected([3], each)] for each in range(4)] == found


def used_late(bound: bool) -> list[Any]:
    options = {} if bound else {"device_id": None}
    with job(BACKEND, **options) as device:
        store = board()
        outer, same = dist.new_group([3, 1]), dist.new_group([1, 3])
        found = [exchanged(device)]
        if rank() in MEMBERS:
            # The others have begun by then what they need all for.
            store.wait(["0 went on", "2 went on"], TIMEOUT)
            found += [exchanged(device, each) for each in (outer, same)]
        else:
            work = dist.barrier(async_op=True)
            store.set(f"{rank()} went on", "")
            assert work is not None
            work.wait()
        if rank() in MEMBERS:
            dist.barrier()
        return found


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_a_group_is_used_while_the_others_are_ahead(bound: bool) -> None:
    found = testing.emulated(used_late, 4, args=[bound])

    assert [
        [expected([0, 1, 2, 3], each)]
        + ([expected([1, 3], each)] * 2 if each in MEMBERS else [])
        for each in range(4)
    ] == found
