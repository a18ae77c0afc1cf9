"""Several groups in one process: at once, one in another, and one after another."""

from __future__ import annotations

import threading
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import meeting
from tests.conformance.group import job, rank, world
from tests.conformance.members import exchanged, expected, leave_together
from tests.conformance.windows import numbers
from weightsync import testing

BACKEND: Final = "weightsync-nccl2"

pytestmark = testing.requires_emulator()


# Members and not


def bound(device: bool) -> dict[str, Any]:
    return {} if device else {"device_id": None}


def told_by(source: dict[str, int], group: Any, device: torch.device) -> list[int]:
    number = numbers(rank(), 1).to(device)
    dist.broadcast(number, group=group, **source)
    return number.tolist()


def without_the_first(device_bound: bool) -> list[Any]:
    with job(BACKEND, **bound(device_bound)) as device:
        found: list[Any] = []
        part, inner = dist.new_group([3, 1]), dist.new_group([3])
        if rank() in {1, 3}:
            assert isinstance(part, dist.ProcessGroup)
            found = [part.rank(), part.size()]
            found += told_by({"src": 3}, part, device)
            found += told_by({"group_src": 1}, part, device)
        if rank() == 3:
            assert isinstance(inner, dist.ProcessGroup)
            found += [inner.rank(), inner.size(), *told_by({"src": 3}, inner, device)]
        return [found, exchanged(device)]


@pytest.mark.parametrize("device_bound", [True, False], ids=["bound", "unbound"])
def test_a_group_without_rank_zero_serves_its_members_and_nobody_waits(
    device_bound: bool,
) -> None:
    found = testing.emulated(without_the_first, 4, args=[device_bound])

    everybody = [expected([0, 1, 2, 3], process) for process in range(4)]
    assert [
        [part, each]
        for part, each in zip(
            [[], [0, 2, 3, 3], [], [1, 2, 3, 3, 0, 1, 3]], everybody, strict=True
        )
    ] == found


def unsorted() -> list[Any]:
    with job(BACKEND) as device:
        group = dist.new_group([3, 1], sort_ranks=False)
        return exchanged(device, group) if rank() in {1, 3} else []


def test_a_group_has_the_order_of_its_ranks_if_that_is_wanted() -> None:
    found = testing.emulated(unsorted, 4)

    assert [[], expected([3, 1], 1), [], expected([3, 1], 3)] == found


def members_only() -> list[Any]:
    with job(BACKEND) as device:
        found: Any = None
        if rank() < 2:
            group = dist.new_group([0, 1], use_local_synchronization=True)
            found = exchanged(device, group)
        return [found, exchanged(device)]


def test_members_make_a_group_without_the_others() -> None:
    found = testing.emulated(members_only, 3)

    assert [
        [expected([0, 1], process), expected([0, 1, 2], process)]
        for process in range(3)
    ] == found


# At once


def together(device_bound: bool) -> list[Any]:
    with job(BACKEND, **bound(device_bound)) as device:
        groups = [dist.new_group() for _ in range(4)]
        found: dict[int, list[int]] = {}

        def use(index: int) -> None:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                total = numbers(index, 1).to(device)
                for _ in range(10):
                    dist.all_reduce(total, group=groups[index])
                found[index] = total.tolist()

        # Every rank begins with another one.
        order = [(index + rank()) % len(groups) for index in range(len(groups))]
        threads = [threading.Thread(target=use, args=[index]) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[index] for index in range(len(groups))]


@pytest.mark.parametrize("device_bound", [True, False], ids=["bound", "unbound"])
def test_groups_of_the_same_members_are_used_at_once(device_bound: bool) -> None:
    found = testing.emulated(together, 2, args=[device_bound])

    assert [[[index * 2**10] for index in range(4)]] * 2 == found


# One after another


def again_and_again() -> list[Any]:
    store, found = meeting(), []
    for _ in range(3):
        place = {"store": store, "rank": rank(), "world_size": world()}
        with job(BACKEND, device_id=None, **place) as device:
            found.append(exchanged(device))
            part = dist.new_group([2, 1])
            found.append(exchanged(device, part) if rank() else None)
    leave_together(world(), dist.PrefixStore("over/", store))
    keys = [key for key in store.list_keys() if "weightsync" in key]
    leave_together(world(), dist.PrefixStore("end/", store))  # its server goes then
    return [*found, keys]


def test_groups_follow_each_other_in_one_store_and_leave_no_keys() -> None:
    found = testing.emulated(again_and_again, 3)

    for process in range(3):
        each = [expected([0, 1, 2], process), expected([1, 2], process)]
        assert [*each * 3, []] == found[process]


def options_of_one() -> list[Any]:
    from datetime import timedelta

    from weightsync.backend import NcclOptions

    options: Any = NcclOptions()
    with job(BACKEND, pg_options=options) as device:
        part = dist.new_group([0, 1], timeout=timedelta(seconds=7), pg_options=options)
        assert isinstance(part, dist.ProcessGroup)
        world_: Any = dist.group.WORLD
        found = [
            each._get_backend(device).options._timeout.total_seconds()
            for each in (world_, part)
        ]
        return [*found, options is not part._get_backend(device).options]


def test_groups_do_not_share_the_options_that_they_are_made_with() -> None:
    assert [[30, 7, True]] * 2 == testing.emulated(options_of_one, 2)


# Smaller and smaller


def shrinks_twice(connected: bool) -> list[Any]:
    with job(BACKEND) as device:
        store = dist.PrefixStore("end/", dist.distributed_c10d._get_default_store())
        world_: Any = dist.group.WORLD
        whole = world_._get_backend(device)
        first = whole.split(store, [0, 1, 2], whole.options)
        if not connected:
            first = create_unconnected(store, 3) if first else None
        found = []
        group = first
        for excluded in ([2], [0]):
            if group is None or group.rank() in excluded:
                group = None
                continue
            last, group = group, group.shrink(excluded)
            last.shutdown()
            total = numbers(rank(), 1).to(device)
            group.allreduce([total]).wait()
            found.append([group.rank(), group.size(), *total.tolist()])
        if group is not None:
            group.shutdown()
        leave_together(world(), store)
        return found


def create_unconnected(store: dist.Store, size: int) -> Any:
    from weightsync import backend

    place = dist.PrefixStore("own/", store)
    return backend.create_nccl(place, rank=rank(), size=size)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_a_group_shrinks_again_and_again(connected: bool) -> None:
    found = testing.emulated(shrinks_twice, 4, args=[connected])

    assert [[[0, 2, 1]], [[1, 2, 1], [0, 1, 1]], [], []] == found
