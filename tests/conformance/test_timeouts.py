"""What becomes of an operation that nobody answers, when its time is over."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.backends import BACKENDS, GO_ON
from tests.conformance.endings import UNHANDLED, be_done, begun, stay
from tests.conformance.group import rank
from tests.conformance.windows import raised
from weightsync import testing

SHORT: Final = timedelta(seconds=1)

CLEAN_UP: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}

NEEDS = "failure"


def meets_nobody(backend: str) -> list[bool]:
    if rank() == 1:
        return []
    began = time.monotonic()
    error = raised(lambda: begun(backend, timeout=SHORT))
    return [bool(error), time.monotonic() - began < 15]


def test_a_group_does_not_wait_forever_for_its_members(backend: str) -> None:
    assert [[True, True], []] == testing.emulated(meets_nobody, 2, args=[backend])


def start(kind: str, number: torch.Tensor) -> Any:
    if kind == "recv":
        return dist.irecv(number, 1)
    return dist.all_reduce(number, async_op=True)


def waits(
    backend: str, kind: str, variables: dict[str, str], limit: float | None
) -> list[bool]:
    options = {} if limit else {"timeout": SHORT}
    number = begun(backend, UNHANDLED | variables, **options)
    if rank() == 1:
        stay()
        return []
    work = start(kind, number)
    began = time.monotonic()
    error = raised(work.wait, *([timedelta(seconds=limit)] if limit else []))
    took = time.monotonic() - began
    group: Any = dist.group.WORLD
    group.abort()
    torch.cuda.synchronize()
    be_done()
    return [bool(error), 0.9 < took < 15]


@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_a_wait_ends_when_its_own_time_is_over(backend: str, kind: str) -> None:
    found = testing.emulated(waits, 2, args=[backend, kind, {}, 1.0])

    assert [[True, True], []] == found


def test_a_blocking_wait_ends_when_the_time_of_the_group_is_over(backend: str) -> None:
    variables = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    found = testing.emulated(waits, 2, args=[backend, "all_reduce", variables, None])

    assert [[True, True], []] == found


def goes_on(backend: str, where: str, variables: dict[str, str]) -> list[bool]:
    """Make a collective that is not waited for, and another one behind it."""
    options = {"timeout": SHORT} if where == "init" else {}
    number = begun(backend, variables, **options)
    group = None
    if where == "setter":
        dist.distributed_c10d._set_pg_timeout(SHORT)
    if where == "part":
        group = dist.new_group(timeout=SHORT)
    if rank() == 1:
        stay()
        return []
    dist.all_reduce(number, group=group)
    torch.cuda.synchronize()
    error = raised(lambda: dist.all_reduce(number, group=group))
    be_done()
    return [bool(error)]


END_IT: Final = [backend for backend in BACKENDS if backend not in GO_ON]


@pytest.mark.parametrize("backend", END_IT)
@pytest.mark.parametrize("where", ["init", "setter", "part"])
def test_a_process_ends_when_nobody_answers_in_time(backend: str, where: str) -> None:
    first, second = testing.outcomes(goes_on, 2, args=[backend, where, {}])

    assert -signal.SIGABRT == first.exit_code
    assert "timed out" in first.output or "timeout" in first.output
    assert second.ok


@pytest.mark.parametrize("backend", GO_ON)
@pytest.mark.parametrize("variables", [{}, UNHANDLED], ids=["handled", "unhandled"])
@pytest.mark.parametrize("where", ["init", "setter", "part"])
def test_a_process_goes_on_when_nobody_answers_in_time(
    backend: str, where: str, variables: dict[str, str]
) -> None:
    found = testing.emulated(goes_on, 2, args=[backend, where, variables])

    assert [[True], []] == found


def test_a_process_goes_on_if_only_the_group_is_to_be_cleaned_up(backend: str) -> None:
    found = testing.emulated(goes_on, 2, args=[backend, "init", CLEAN_UP])

    assert [[True], []] == found


@pytest.mark.parametrize("backend", END_IT)
def test_nothing_ends_where_errors_are_not_handled(backend: str) -> None:
    first, second = testing.outcomes(
        *(goes_on, 2), args=[backend, "init", UNHANDLED], hang_seconds=3
    )

    assert first.hung
    assert "rank 1 to come to collective 1" in first.output
    assert second.ok
