"""Pushes that are given up before the other ranks could know of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

import weightsync
from tests.processes.harness import free_address


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1 << 20,), float(value))}


async def _outcome(push: asyncio.Future[weightsync.PushReport]) -> object:
    try:
        return (await push).version
    except (weightsync.WeightSyncError, asyncio.CancelledError) as error:
        return type(error)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_calls_of_the_ranks_still_belong_together_after_one_was_given_up(
    how: str,
) -> None:
    address = free_address()
    received = {"w": torch.zeros(1 << 20)}
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                weightsync.Trainer(address, rank=rank, world_size=2, timeout=20)
            )
            for rank in range(2)
        ]
        generator = await stack.enter_async_context(
            weightsync.Generator(address, received, replica="g", timeout=20)
        )
        for rank in ranks:
            await rank.wait_for_replicas(1)
        first = asyncio.ensure_future(ranks[0].push(_weights(1), timeout=10))
        await asyncio.sleep(0.05)
        limit = 0.2 if how == "timeout" else 10
        queued = asyncio.ensure_future(ranks[0].push(_weights(2), timeout=limit))
        await asyncio.sleep(0.05)
        if how == "cancel":
            queued.cancel()
        mine = [await _outcome(queued)]
        theirs = [await _outcome(asyncio.ensure_future(ranks[1].push(_weights(1))))]
        mine.insert(0, await _outcome(first))
        await generator.receive(timeout=10)
        theirs.append(await _outcome(asyncio.ensure_future(ranks[1].push(_weights(2)))))
        both = [asyncio.ensure_future(rank.push(_weights(3))) for rank in ranks]
        last = [await _outcome(push) for push in both]
        await generator.receive(timeout=10)

    lost = asyncio.CancelledError if how == "cancel" else weightsync.TimedOutError
    told = weightsync.ClosedError if how == "cancel" else weightsync.TimedOutError
    assert ([1, lost], [1, told], [2, 2]) == (mine, theirs, last)
    assert torch.equal(received["w"], _weights(3)["w"])
