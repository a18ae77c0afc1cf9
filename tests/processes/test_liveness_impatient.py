"""Callers that cancel again before the first cancellation has come through."""

from __future__ import annotations

import asyncio
import contextlib
import warnings

import pytest
import torch

import weightsync
from tests.processes.harness import free_address


async def _cancel_thrice(transport: weightsync.Trainer, weights: torch.Tensor) -> None:
    task = asyncio.ensure_future(transport.push({"w": weights}, timeout=10))
    await asyncio.sleep(0.002)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_again_and_again_ends_cleanly() -> None:
    weights = torch.ones(8 << 20)
    received = torch.zeros(8 << 20)
    address = free_address()
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with (
        weightsync.Trainer(address, timeout=20) as trainer,
        weightsync.Generator(address, {"w": received}, replica="g") as generator,
    ):
        await trainer.wait_for_replicas(1)
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(10):
                await _cancel_thrice(trainer, weights)
                with contextlib.suppress(weightsync.TimedOutError):
                    await generator.receive(timeout=0.05)
        report = await trainer.push({"w": weights * 2}, timeout=10)
        while generator.version != report.version:
            await generator.receive(timeout=10)

    assert ([], []) == (failures, [str(warning.message) for warning in caught])
    assert torch.equal(received.view(torch.uint8), (weights * 2).view(torch.uint8))
