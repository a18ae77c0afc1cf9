"""Windows of groups that ``reconfigure`` forms."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
import torch

from tests.conformance.group import octets, rank
from tests.conformance.members import (
    exchanged,
    expected,
    form,
    forming,
    leave_together,
    put_on,
)
from tests.conformance.windows import board, numbers, opened, raised
from weightsync import testing

NEEDS = "reconfigure"

# With this NCCL makes communicators whose calls return when they are done, whatever the
# backend asks for.
BLOCKING: Final = {"NCCL_COMM_BLOCKING": "1"}


def windows_of_generations(
    backend: str, variables: dict[str, str], plan: list[list[int]]
) -> list[Any]:
    os.environ.update(variables)
    with forming(backend) as device:
        found = [
            put_on(device) if form(number, members) else None
            for number, members in enumerate(plan)
        ]
        leave_together(3)
        return found


@pytest.mark.parametrize("variables", [{}, BLOCKING], ids=["as it is", "blocking"])
def test_every_generation_has_windows(backend: str, variables: dict[str, str]) -> None:
    plan = [[0, 1], [2, 0, 1], [1, 2], [2]]
    found = testing.emulated(windows_of_generations, 3, args=[backend, variables, plan])

    assert [
        [[1], [2], None, None],
        [[0], [0], [2], None],
        [None, [1], [1], [2]],
    ] == found


def uses_an_old_window(backend: str) -> list[Any]:
    os.environ.update(BLOCKING)
    with forming(backend) as device:
        form(0, [0, 1])
        memory, tensor, window = opened(device, numbers(0, 4))
        source = memory.holding(numbers(10, 4))
        window.put(source, 1 - rank(), 0, False).wait()
        window.wait_signal(1 - rank(), False).wait()
        found = octets(tensor)
        form(1, [0, 1])
        error = raised(window.put, source, 1 - rank(), 0, False)
        tensor.copy_(numbers(0, 4))
        after = exchanged(device)
        leave_together(2)
        return [found, bool(error), octets(tensor), after]


def test_a_window_ends_with_its_generation(backend: str) -> None:
    found = testing.emulated(uses_an_old_window, 2, args=[backend])

    assert [
        [octets(numbers(10, 4)), True, octets(numbers(0, 4)), expected([0, 1], process)]
        for process in range(2)
    ] == found


def leaves_signals(backend: str) -> list[int]:
    os.environ.update(BLOCKING)
    with forming(backend) as device:
        form(0, [0, 1])
        memory, tensor, window = opened(device, numbers(0, 1))
        for _ in range(3):
            window.signal(1 - rank(), False).wait()
        torch.cuda.synchronize()
        form(1, [0, 1])
        memory, tensor, window = opened(device, numbers(0, 1))
        # A signal that was left would end the wait before the put.
        waits = None if rank() else window.wait_signal(1, True)
        if rank() == 0:
            board().set("waits", "")
            waits.wait()  # type: ignore[union-attr] # there is one
            found = tensor.tolist()
        else:
            board().wait(["waits"])
            window.put(memory.holding(numbers(7, 1)), 0, 0, False).wait()
            found = [7]
        leave_together(2)
        return found


def test_signals_end_with_their_generation(backend: str) -> None:
    found = testing.emulated(leaves_signals, 2, args=[backend], nccl="2.31.2")

    assert [[7]] * 2 == found
