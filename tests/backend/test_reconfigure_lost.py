"""What ``reconfigure`` leaves behind, also when a member is lost in between."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions

from tests.backend.ending import OURS
from tests.backend.test_reconfigure import weightsync_group
from tests.conformance.members import (
    exchanged,
    expected,
    form,
    forming,
    handles_of,
    leave_together,
)
from tests.conformance.windows import raised
from tests.processes.driven import census
from weightsync import testing

pytestmark = testing.requires_emulator()

LIMIT: Final = timedelta(seconds=5)


def forms_often() -> list[Any]:
    with forming(OURS) as device:
        found: list[Any] = []
        for generation in range(4):
            form(generation, [0, 1] if generation % 2 else [1, 0])
            found.append(exchanged(device))
        keys: list[str] = dist.distributed_c10d._get_default_store().list_keys()
        leave_together(2)
        ours = [key.partition("/reconfigure/")[2] for key in keys]
        return [found[-1], sorted(filter(None, ours))]


def test_a_generation_leaves_one_key_in_the_store_of_its_first_member() -> None:
    found = testing.emulated(forms_often, 2)

    keys = [f"{generation}/claimed" for generation in range(1, 5)]
    assert [[expected([0, 1], process), keys] for process in range(2)] == found


def loses_one_between_the_meetings() -> list[Any]:
    with forming(OURS) as device:
        form(0, [0, 1, 2])
        exchanged(device)
        handles = handles_of(1, [0, 1, 2])
        before = census()
        error = raised(dist._reconfigure, 2, handles, None, LIMIT)
        until = time.monotonic() + 5
        while is_more(before) and time.monotonic() < until:
            time.sleep(0.05)
        left = is_more(before)
        form(2, [1, 0])
        found = exchanged(device)
        leave_together(2)
        return [error.partition("these ranks")[2] or error, left, found]


def is_more(before: Any) -> bool:
    """Whether there are more threads or descriptors than before."""
    now = census()
    return now.threads > before.threads or now.descriptors > before.descriptors


def test_who_dies_once_all_agreed_is_noticed_before_nccl_would_wait_for_it() -> None:
    *rest, killed = testing.outcomes(
        loses_one_between_the_meetings, 3, faults="abort@rank=2:kill", hang_seconds=0
    )
    words = " did not come in time: 2"

    assert not killed.ok
    assert [[words, False, expected([1, 0], process)] for process in range(2)] == [
        each.result for each in rest
    ], rest


def aborts_while_nobody_listens() -> list[Any]:
    """Form a group whose first member, in whose store they meet, is gone already."""
    gone, waits = weightsync_group(), weightsync_group()
    options = ReconfigureOptions()
    options.uuid = 1
    options.handles = [gone.get_reconfigure_handle(), waits.get_reconfigure_handle()]
    options.timeout = timedelta(seconds=60)
    gone.abort()
    errors: list[str] = []
    forming = threading.Thread(
        target=lambda: errors.append(raised(waits.reconfigure, options))
    )
    forming.start()
    time.sleep(0.5)  # nothing tells that it has begun to wait
    waiting = not errors
    began = time.monotonic()
    waits.abort()
    forming.join(30)
    return [waiting, time.monotonic() - began < 5, bool(errors and errors[0])]


def test_an_abort_ends_the_wait_for_a_first_member_that_is_gone() -> None:
    assert [[True] * 3] == testing.emulated(aborts_while_nobody_listens, 1)
