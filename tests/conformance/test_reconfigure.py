"""``reconfigure``: groups that are formed, and formed anew of other members."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import in_turn, meeting
from tests.conformance.group import rank
from tests.conformance.members import (
    begin,
    exchanged,
    expected,
    form,
    forming,
    handles_of,
    leave_together,
)
from tests.conformance.windows import numbers, raised
from weightsync import testing

NEEDS = "reconfigure"

SHORT: Final = timedelta(seconds=1)


def generations(backend: str, plan: list[list[int]], processes: int) -> list[Any]:
    with forming(backend) as device:
        found = [
            exchanged(device) if form(number, members) else None
            for number, members in enumerate(plan)
        ]
        leave_together(processes)
        return found


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([[2, 0, 1]], id="order"),
        pytest.param([[0, 1, 2], [2, 0]], id="smaller"),
        pytest.param([[0, 1], [0, 1, 2, 3]], id="larger"),
        pytest.param([[0, 1], [0, 2], [3, 2]], id="replaced"),
        pytest.param([[0, 1, 2], [0, 2], [1, 2, 0]], id="returned"),
        pytest.param([[1], [1, 0], [0], [0, 1]], id="alone"),
        pytest.param([[0, 1]] * 5, id="same"),
    ],
)
def test_a_group_is_formed_of_the_listed_members_in_their_order(
    backend: str, plan: list[list[int]]
) -> None:
    processes = 1 + max(max(members) for members in plan)
    found = testing.emulated(generations, processes, args=[backend, plan, processes])

    for process in range(processes):
        assert [expected(members, process) for members in plan] == found[process]


def forms_from_a_set(backend: str) -> list[Any]:
    with forming(backend) as device:
        dist._reconfigure(1, set(handles_of(0, [0, 1, 2]))).wait()
        found = exchanged(device)
        leave_together(3)
        return found


def test_a_set_of_handles_gives_every_member_a_rank(backend: str) -> None:
    found = testing.emulated(forms_from_a_set, 3, args=[backend])
    members = found[0][1]

    assert [0, 1, 2] == sorted(members)
    assert [expected(members, process) for process in range(3)] == found


def forms_with_a_device(backend: str) -> list[Any]:
    with forming(backend, device_id=torch.device("cuda", rank())) as device:
        form(0, [1, 0])
        found = exchanged(device)
        leave_together(2)
        return found


def test_a_group_to_be_formed_may_be_bound_to_a_device(backend: str) -> None:
    found = testing.emulated(forms_with_a_device, 2, args=[backend])

    assert [expected([1, 0], process) for process in range(2)] == found


# Before it is formed


def uses_too_early(backend: str) -> list[Any]:
    with forming(backend) as device:
        number = numbers(0, 1).to(device)
        errors = [
            raised(dist.all_reduce, number),
            raised(dist.send, number, 1 - rank()),
            raised(dist._new_window),
        ]
        form(0, [0, 1])
        found = exchanged(device)
        leave_together(2)
        return [all(errors), found]


def test_a_group_is_of_no_use_before_it_is_formed(backend: str) -> None:
    found = testing.emulated(uses_too_early, 2, args=[backend])

    assert [[True, expected([0, 1], process)] for process in range(2)] == found


def destroys(backend: str) -> list[Any]:
    store, found = meeting(), []
    for turn, members in enumerate(([1, 0], [0, 1])):
        begin(backend, **in_turn(store, turn))
        form(0, members)
        found.append(exchanged(torch.device("cuda", rank())))
        dist.destroy_process_group()
    return found


def test_a_formed_group_is_destroyed_and_another_one_formed(backend: str) -> None:
    found = testing.emulated(destroys, 2, args=[backend])

    assert [
        [expected([1, 0], process), expected([0, 1], process)] for process in range(2)
    ] == found


def ends_unformed(backend: str) -> bool:
    store = meeting()
    begin(backend, **in_turn(store, 0))
    dist.destroy_process_group()
    leave_together(2, store)
    return dist.is_initialized()


def test_a_group_that_was_never_formed_can_be_destroyed(backend: str) -> None:
    assert [False] * 2 == testing.emulated(ends_unformed, 2, args=[backend])


def says_what_it_can(backend: str) -> list[bool]:
    with forming(backend):
        handle = dist._get_reconfigure_handle()
        leave_together(2)
        return [dist._supports_reconfigure(), isinstance(handle, str), bool(handle)]


def test_a_group_tells_that_it_can_be_formed_anew(backend: str) -> None:
    found = testing.emulated(says_what_it_can, 2, args=[backend])

    assert [[True] * 3] * 2 == found


# What is refused


def refused_handles(backend: str) -> list[Any]:
    with forming(backend) as device:
        form(0, [0, 1])
        own, other = sorted(handles_of(1, [rank(), 1 - rank()]))
        mine = dist._get_reconfigure_handle()
        theirs = other if own == mine else own
        wrong: list[Any] = [[], set(), [theirs], [mine, mine], [mine, "garbage"]]
        errors = [raised(dist._reconfigure, 2, handles) for handles in wrong]
        found = exchanged(device)
        leave_together(2)
        return [all(errors), found]


def test_wrong_handles_are_refused_and_leave_the_group_as_it_is(backend: str) -> None:
    found = testing.emulated(refused_handles, 2, args=[backend])

    assert [[True, expected([0, 1], process)] for process in range(2)] == found


def takes_a_number_twice(backend: str) -> list[Any]:
    with forming(backend) as device:
        form(0, [0])
        error = raised(dist._reconfigure, 1, handles_of(1, [0]))
        form(2, [0])
        return [bool(error), exchanged(device)]


def test_a_number_that_was_used_is_refused(backend: str) -> None:
    found = testing.emulated(takes_a_number_twice, 1, args=[backend])

    assert [[True, expected([0], 0)]] == found


# When a member is lost


def forms_with_nobody(backend: str) -> list[Any]:
    """Each of two processes tries alone first, as the first rank and as the second."""
    with forming(backend) as device:
        handles = handles_of(0, [0, 1])
        began = time.monotonic()
        error = raised(dist._reconfigure, 1 + rank(), handles, None, SHORT)
        took = time.monotonic() - began
        form(5, [0, 1])
        found = exchanged(device)
        leave_together(2)
        return [bool(error), 0.9 < took < 15, found]


def test_a_member_that_does_not_come_is_not_waited_for_forever(backend: str) -> None:
    found = testing.emulated(forms_with_nobody, 2, args=[backend])

    assert [[True, True, expected([0, 1], process)] for process in range(2)] == found


def loses_a_member(backend: str) -> list[Any]:
    with forming(backend, timeout=timedelta(seconds=20)) as device:
        form(0, [0, 1, 2])
        found = [exchanged(device)]
        work = dist.all_reduce(numbers(0, 1).to(device), async_op=True)
        error = raised(work.wait, timedelta(seconds=1))
        form(1, [1, 0])
        found.append(exchanged(device))
        leave_together(2)
        return [bool(error), *found]


def test_the_rest_goes_on_when_a_member_was_killed(backend: str) -> None:
    *rest, killed = testing.outcomes(
        loses_a_member, 3, args=[backend], faults="all_reduce@rank=2,n=2:kill"
    )

    assert -signal.SIGKILL == killed.exit_code
    assert [
        [True, expected([0, 1, 2], process), expected([1, 0], process)]
        for process in range(2)
    ] == [each.result for each in rest]
