"""``shrink_group``: a group without some of its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT, SHRINK_DEFAULT

from tests.conformance.group import job, rank
from tests.conformance.members import exchanged, expected, leave_together, quiet
from tests.conformance.windows import board, numbers, raised
from weightsync import testing

NEEDS = "split"


def shrinks(backend: str, excluded: list[int], flags: int) -> list[Any] | None:
    quiet()
    with job(backend) as device:
        store = board()
        exchanged(device)
        found = None
        if rank() not in excluded:
            group = dist.shrink_group(excluded, shrink_flags=flags)
            found = [exchanged(device, group), exchanged(device)]
        leave_together(3, store)
        return found


@pytest.mark.parametrize("flags", [SHRINK_DEFAULT, SHRINK_ABORT])
@pytest.mark.parametrize("excluded", [[1], [0], [2, 0]], ids=str)
def test_the_default_group_shrinks(
    backend: str, excluded: list[int], flags: int
) -> None:
    found = testing.emulated(shrinks, 3, args=[backend, excluded, flags])
    rest = [each for each in range(3) if each not in excluded]

    for process in range(3):
        each = expected(rest, process)
        assert (None if each is None else [each, each]) == found[process]


def shrinks_a_part(backend: str) -> list[Any]:
    quiet()
    with job(backend) as device:
        # torch takes the ranks to exclude for those of the default group here, so the
        # part is one in which both are the same.
        part = dist.new_group([0, 1])
        found = [exchanged(device, part)] if rank() < 2 else []
        if rank() == 0:
            found.append(exchanged(device, dist.shrink_group([1], group=part)))
        return [*found, exchanged(device)]


def test_a_part_shrinks_and_the_default_group_stays(backend: str) -> None:
    found = testing.emulated(shrinks_a_part, 3, args=[backend])
    world = [expected([0, 1, 2], process) for process in range(3)]

    assert [expected([0, 1], 0), expected([0], 0), world[0]] == found[0]
    assert [expected([0, 1], 1), world[1]] == found[1]
    assert [world[2]] == found[2]


def gives_up(backend: str) -> list[Any] | None:
    quiet()
    with job(backend) as device:
        store = board()
        exchanged(device)
        found = None
        if rank() < 2:
            dist.all_reduce(numbers(0, 1).to(device), async_op=True)
            dist.shrink_group([2], shrink_flags=SHRINK_ABORT)
            found = exchanged(device)
        leave_together(3, store)
        return found


def test_a_collective_that_nobody_answers_is_given_up_to_shrink(backend: str) -> None:
    found = testing.emulated(gives_up, 3, args=[backend])

    assert [expected([0, 1], process) for process in range(3)] == found


def refused(backend: str) -> list[bool]:
    with job(backend) as device:
        exchanged(device)
        wrong: list[Any] = [[], [0, 1], [2], [-1], [1 - rank()] * 2, [rank()], "1"]
        errors = [raised(dist.shrink_group, excluded) for excluded in wrong]
        errors.append(raised(dist.shrink_group, [1 - rank()], None, 4))
        exchanged(device)
        return [bool(error) for error in errors]


def test_an_impossible_shrink_is_refused(backend: str) -> None:
    assert [[True] * 8] * 2 == testing.emulated(refused, 2, args=[backend])
