"""An opening that is cancelled at any moment: nothing of it stays, nothing failed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes.driven import Census, census_at_rest
from tests.processes.harness import free_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SECONDS = 20.0
STEPS = 30
LONGEST = 0.1
"""Seconds before a cancellation, the last of so many."""


async def _opened_until(
    then: Callable[[], Awaitable[object]], address: str, ranks: int
) -> float:
    """Open the ranks of a replica, and cancel that; return how long they then take."""

    async def open_it(rank: int) -> None:
        generator = weightsync.Generator(
            address,
            {"w": torch.zeros(4)},
            replica="gen",
            rank=rank,
            world_size=ranks,
            timeout=SECONDS,
        )
        async with generator:
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        for rank in range(ranks):
            tasks.start_soon(open_it, rank)
        await then()
        tasks.cancel_scope.cancel()
        cancelled = anyio.current_time()
    return anyio.current_time() - cancelled


def _grown(first: Census, last: Census) -> bool:
    more = last.descriptors - first.descriptors, last.threads - first.threads
    return max(more) > 2


async def _at_rest(first: Census) -> Census:
    """Count what is open; links that were dropped may take a moment to end."""
    with anyio.move_on_after(SECONDS):
        while _grown(first, census_at_rest()):
            await anyio.sleep(0.1)
    return census_at_rest()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_whose_opening_is_cancelled_at_any_moment_has_left(
    backend: str, ranks: int
) -> None:
    async def main() -> None:
        address = free_address()
        async with weightsync.Trainer(address, timeout=SECONDS) as trainer:
            joined = partial(trainer.wait_for_replicas, 1)
            await _opened_until(joined, address, ranks)
            first = census_at_rest(0)
            for step in range(STEPS):
                pause = partial(anyio.sleep, LONGEST * (step / STEPS) ** 2)
                seconds = await _opened_until(pause, address, ranks)
                assert seconds < 3.0
            with anyio.fail_after(SECONDS):
                while (await trainer.membership()).replicas:
                    await anyio.sleep(0.01)
            last = await _at_rest(first)
            newest = (await trainer.membership()).number
            events = trainer.events(after=0)
            found = [await anext(events) for _ in range(newest)]

        kinds = [event.kind for event in found if event.role == "replica"]
        assert kinds[:2] == ["joined", "left"], kinds
        failed = [event for event in found if event.kind == "failed"]
        assert not failed, failed
        assert not _grown(first, last), (first, last)

    anyio.run(main, backend=backend)
