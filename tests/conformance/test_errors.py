"""Errors of NCCL, and calls that cannot be: both are exceptions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.conformance.backends import LACKING
from tests.conformance.endings import in_turn, meeting
from tests.conformance.group import job, rank
from tests.conformance.members import exchanged, expected, leave_together
from tests.conformance.windows import numbers, raised
from weightsync import testing

CODES = (1, 2, 3, 4, 5, 6)


def fails_often(backend: str) -> list[str]:
    with job(backend) as device:
        number = numbers(1, 1).to(device)
        errors = [raised(dist.all_reduce, number) for _ in range(len(CODES) + 2)]
        return [*errors, str(number.tolist())]


def test_an_error_of_nccl_is_an_exception_at_the_call(backend: str) -> None:
    faults = [
        f"all_reduce@n={number}:fail={code}"
        for number, code in enumerate(CODES, start=2)
    ]
    words = [
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited",
    ]
    for found in testing.emulated(fails_often, 2, args=[backend], faults=faults):
        first, *failed, last, value = found

        assert ["", "", "[4]"] == [first, last, value]
        assert [] == [
            word
            for word, text in zip(words, failed, strict=True)
            if word not in text or "Error" not in text
        ]


def begins(backend: str, **options: Any) -> str:
    """Open a group, and return the error of that; all ranks leave together."""
    store = meeting()
    options |= in_turn(store, 0)
    error = raised(lambda: job(backend, **options).__enter__())
    leave_together(2, store)
    return error


def test_an_error_of_nccl_at_the_beginning_is_an_exception(backend: str) -> None:
    found = testing.emulated(begins, 2, args=[backend], faults="init:fail=2")

    assert [True] * 2 == ["unhandled system error" in each for each in found]


def misplaced(backend: str) -> list[Any]:
    with job(backend) as device:
        other = torch.device("cuda", 5)
        wrong = [
            (dist.all_reduce, numbers(0, 1)),
            (dist.all_reduce, numbers(0, 1).to(other)),
            (dist.broadcast, numbers(0, 1), 0),
            (dist.send, numbers(0, 1), 1 - rank()),
        ]
        errors = [raised(*call) for call in wrong]
        return [[bool(error) for error in errors], exchanged(device)]


def test_tensors_elsewhere_are_refused_and_the_group_stays(backend: str) -> None:
    found = testing.emulated(misplaced, 2, args=[backend])

    assert [[[True] * 4, expected([0, 1], process)] for process in range(2)] == found


def capabilities(backend: str) -> list[bool]:
    with job(backend) as device:
        group: Any = dist.group.WORLD
        back = group._get_backend(device)
        offered = [
            (dist._supports_window(), dist._new_window),
            (dist._supports_reconfigure(), dist._get_reconfigure_handle),
            (back.supports_window, back.new_window),
            (back.supports_reconfigure, back.get_reconfigure_handle),
        ]
        return [supported == (not raised(call)) for supported, call in offered]


def test_a_group_offers_what_it_says_and_refuses_the_rest(backend: str) -> None:
    assert [[True] * 4] * 2 == testing.emulated(capabilities, 2, args=[backend])


def asks_to_form(backend: str) -> str:
    return begins(backend, device_id=None, enable_reconfigure=True)


def test_a_group_cannot_be_formed_anew_where_the_backend_does_not_offer_it(
    backend: str,
) -> None:
    offered = "reconfigure" not in LACKING.get(backend, ())
    found = testing.emulated(asks_to_form, 2, args=[backend])

    assert [offered] * 2 == [not error for error in found]
