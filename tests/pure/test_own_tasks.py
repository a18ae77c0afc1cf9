"""Tasks that end before others, and threads that are left to themselves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest

from weightsync.runtime import OwnTasks, StuckError, Tasks, in_thread_for

if TYPE_CHECKING:
    from weightsync.errors import WeightSyncError

pytestmark = pytest.mark.anyio


async def test_own_tasks_end_together_and_others_go_on() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            ended.append(name)

    async with anyio.create_task_group() as group:
        tasks = Tasks(group)
        own = OwnTasks(tasks)
        tasks.start_soon(wait, "other")
        for name in ("a", "b"):
            own.start_soon(wait, name)
        await anyio.sleep(0.01)
        await own.end()
        before = sorted(ended)
        own.start_soon(wait, "late")
        await anyio.sleep(0.02)
        group.cancel_scope.cancel()

    assert ["a", "b"] == before
    assert ["a", "b", "other"] == sorted(ended)


async def test_a_crash_of_an_own_task_is_told_to_the_others() -> None:
    told: list[WeightSyncError] = []

    async def crash() -> None:
        raise KeyError("gone")

    async with anyio.create_task_group() as group:
        tasks = Tasks(group)
        tasks.on_crash = told.append
        own = OwnTasks(tasks)
        own.start_soon(crash)
        await anyio.sleep(0.01)
        await own.end()

    assert ["internal failure: KeyError: 'gone'"] == [str(error) for error in told]


async def test_a_thread_that_is_stuck_is_left_in_time() -> None:
    go_on = threading.Event()
    try:
        started = anyio.current_time()
        with pytest.raises(StuckError, match=r"no answer within 0\.1 s"):
            await in_thread_for(0.1, go_on.wait)
        with anyio.move_on_after(0.1) as scope:
            await in_thread_for(10.0, go_on.wait)
        seconds = anyio.current_time() - started
    finally:
        go_on.set()

    assert scope.cancelled_caught
    assert seconds < 2.0


async def test_what_a_thread_returns_or_raises_in_time_is_passed_on() -> None:
    with ThreadPoolExecutor(1) as pool:
        value = await in_thread_for(10.0, pool.submit(int, "7").result)
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread_for(10.0, pool.submit(int, "x").result)

    assert 7 == value
