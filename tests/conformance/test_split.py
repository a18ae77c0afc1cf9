"""Groups that are made of a part of another group's ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import job, rank
from tests.conformance.members import exchanged, expected, leave_together
from tests.conformance.windows import numbers, raised
from weightsync import testing

WAYS = ("split_group", "new_group")

NEEDS = "split"


def made(way: str, groups: list[list[int]]) -> Any:
    """Make groups of these ranks; return that of this process, None without one."""
    if way == "split_group":
        found: list[Any] = [dist.split_group(split_ranks=groups)]
    else:
        found = [dist.new_group(ranks) for ranks in groups]
    return next((each for each in found if isinstance(each, dist.ProcessGroup)), None)


def used(device: torch.device, group: Any) -> list[Any] | None:
    return None if group is None else exchanged(device, group)


def parts(backend: str, groups: list[list[int]]) -> list[Any]:
    with job(backend) as device:
        found = []
        for way in WAYS:
            group = made(way, groups)
            found += [used(device, group), exchanged(device), used(device, group)]
        return found


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[0, 1], [2, 3]], id="halves"),
        pytest.param([[1, 2]], id="without the first"),
        pytest.param([[0, 3], [1], [2]], id="one alone"),
    ],
)
def test_parts_of_a_group_are_groups(backend: str, groups: list[list[int]]) -> None:
    found = testing.emulated(parts, 4, args=[backend, groups])

    for process in range(4):
        members = next((each for each in groups if process in each), [])
        part, world = expected(members, process), expected([0, 1, 2, 3], process)
        assert [part, world, part] * len(WAYS) == found[process]


def splits_itself(backend: str) -> list[list[int]]:
    with job(backend) as device:
        world: Any = dist.group.WORLD
        found = []
        for ranks in ([3, 1], [0], [0, 1, 2, 3]):
            group = world.split_group(ranks)
            if group is not None:
                total = numbers(rank(), 1).to(device)
                group.allreduce([total]).wait()
                found.append([group.rank(), group.size(), *total.tolist()])
                group.shutdown()
        return found


def test_a_process_group_splits_itself(backend: str) -> None:
    found = testing.emulated(splits_itself, 4, args=[backend])

    assert [
        [[0, 1, 0], [0, 4, 6]],
        [[1, 2, 4], [1, 4, 6]],
        [[2, 4, 6]],
        [[0, 2, 4], [3, 4, 6]],
    ] == found


def orders(backend: str) -> list[Any]:
    with job(backend) as device:
        found = exchanged(device, made("split_group", [[2, 0], [3, 1]]))
        leave_together(4)
        return found


def test_the_order_of_a_split_is_that_of_its_ranks(backend: str) -> None:
    found = testing.emulated(orders, 4, args=[backend])

    assert [
        expected([2, 0] if process in {0, 2} else [3, 1], process)
        for process in range(4)
    ] == found


def nested(backend: str) -> list[Any]:
    with job(backend) as device:
        half: Any = made("split_group", [[0, 1], [2, 3]])
        single = dist.split_group(half, [[1]])
        inner = single if isinstance(single, dist.ProcessGroup) else None
        found = [used(device, inner), used(device, half)]
        leave_together(4)
        return found


def test_a_part_has_parts(backend: str) -> None:
    found = testing.emulated(nested, 4, args=[backend])

    for process in range(4):
        half = [0, 1] if process < 2 else [2, 3]
        assert [expected([half[1]], process), expected(half, process)] == found[process]


def destroys_parts(backend: str) -> list[Any]:
    with job(backend) as device:
        found = []
        for way in ("split_group", "new_group"):
            group = made(way, [[0, 1], [2]])
            found.append(used(device, group))
            dist.destroy_process_group(group)
            found += [bool(raised(exchanged, device, group)), exchanged(device)]
        return found


def test_a_part_is_destroyed_alone(backend: str) -> None:
    found = testing.emulated(destroys_parts, 3, args=[backend])

    for process in range(3):
        part = expected([0, 1] if process < 2 else [2], process)
        assert [part, True, expected([0, 1, 2], process)] * 2 == found[process]


def unbound(backend: str) -> list[Any]:
    with job(backend, device_id=None) as device:
        group = dist.new_group([1, 2], device_id=device)
        member = isinstance(group, dist.ProcessGroup)
        return [exchanged(device, group) if member else None, exchanged(device)]


def test_a_new_group_needs_no_device_of_its_parent(backend: str) -> None:
    found = testing.emulated(unbound, 3, args=[backend])

    assert [
        [expected([1, 2], process), expected([0, 1, 2], process)]
        for process in range(3)
    ] == found


def refused(backend: str) -> list[bool]:
    with job(backend) as device:
        wrong = [[[0, 0]], []]
        errors = [raised(dist.split_group, None, groups) for groups in wrong]
        exchanged(device)
        return [bool(error) for error in errors]


def test_an_impossible_split_is_refused(backend: str) -> None:
    assert [[True] * 2] * 2 == testing.emulated(refused, 2, args=[backend])
