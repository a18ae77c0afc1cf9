"""Awaiting what NCCL does: CUDA tells the loop, and nobody asks or waits in between."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any, Final

import anyio
import pytest
import torch.distributed as dist

from tests.backend.windows import OURS, mine
from tests.conformance.group import job, rank
from tests.conformance.windows import board
from weightsync import testing
from weightsync.errors import WeightSyncError
from weightsync.window import Window

PAUSE: Final = 0.6
QUERIES: Final = 60
"""Five times as often as the watchdog looks; a tenth of once in a millisecond."""


def _window(device: Any) -> Window:
    group: Any = dist.group.WORLD
    return Window(group, Window.allocate(group, 4096, device=device))


def _count(name: str) -> int:
    return testing.calls().get(name, 0)


async def _waiting(window: Window) -> list[Any]:
    """Await a signal that comes late, while the loop goes on."""
    operation = window.wait_signal(1)
    threads = threading.active_count()
    asked, told = _count("cudaEventQuery"), _count("cudaLaunchHostFunc")
    beats = 0
    async with anyio.create_task_group() as group:
        group.start_soon(operation._finish)
        for _ in range(20):
            await anyio.sleep(PAUSE / 20)
            beats += 1
        more = threading.active_count() - threads
        early = operation.done()
        asked = _count("cudaEventQuery") - asked
        board().set("late", "")
    told = _count("cudaLaunchHostFunc") - told
    return [beats, more, early, operation.done(), told, asked < QUERIES]


async def _cancelled(window: Window) -> list[Any]:
    """Give the wait for a signal up, which goes on nevertheless."""
    operation = window.wait_signal(1)
    with anyio.move_on_after(0.05) as scope:
        await operation
    early = operation.done()
    board().set("cancelled", "")
    await operation
    return [scope.cancelled_caught, early, operation.done()]


async def _often(window: Window) -> int:
    """Await many puts; return how many descriptors that leaves open."""
    source = window.local[:64]
    await window.put(source, 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        await window.put(source, 0)
    return len(os.listdir("/proc/self/fd")) - before


def _awaits(loop: str) -> list[Any]:
    with job(OURS) as device:
        window = _window(device)
        found: list[Any] = []
        if rank() == 0:
            steps = (_waiting, _cancelled, _often)
            found = [anyio.run(partial(each, window), backend=loop) for each in steps]
        else:
            for moment in ("late", "cancelled"):
                board().wait([moment])
                window.signal(0).wait(20)
        dist.barrier()
        window.close()
        return found


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_an_awaited_operation_takes_no_thread_and_no_polling(loop: str) -> None:
    waiting, cancelled, descriptors = testing.emulated(_awaits, 2, args=[loop])[0]

    assert [20, 0, False, True, 1, True] == waiting
    assert [True, False, True] == cancelled
    assert 0 == descriptors


def _aborts() -> str:
    with job(OURS) as device:
        window = _window(device)
        group = mine(device)

        async def put() -> str:
            threading.Timer(0.2, group.abort).start()
            try:
                await window.put(window.local[:64], 0)
            except WeightSyncError as error:
                return type(error).__name__
            return ""

        return anyio.run(put)


def test_an_abort_ends_the_await_of_a_put_that_never_completes() -> None:
    found = testing.emulated(_aborts, 1, faults="put@n=1:stall")

    assert ["ClosedError"] == found
