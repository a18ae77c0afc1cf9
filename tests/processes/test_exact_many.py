"""Thousands of small tensors cost little more than one of the same size."""

from __future__ import annotations

import os
import time
from statistics import median

import pytest
import torch

from tests.processes.rig import open_job

pytestmark = pytest.mark.anyio

COUNT, SIZE = 5000, 256


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _push_times(source: dict[str, torch.Tensor], rounds: int) -> list[float]:
    weights = {name: torch.full_like(tensor, -777.0) for name, tensor in source.items()}
    seconds, descriptors = [], set()
    async with open_job() as job:
        generator = await job.join_one(weights)
        for _ in range(rounds):
            started = time.perf_counter()
            await job.push(source)
            await generator.receive(timeout=20)
            seconds.append(time.perf_counter() - started)
            if len(seconds) > 2:
                descriptors.add(len(os.listdir("/proc/self/fd")))
    assert all(torch.equal(source[name], weights[name]) for name in source)
    # A call that is just ending may still hold one.
    assert max(descriptors) - min(descriptors) <= 2
    return seconds


async def test_many_small_tensors_arrive_about_as_fast_as_one() -> None:
    whole = torch.arange(float(COUNT * SIZE))
    small = {f"layer.{i}.w": part.clone() for i, part in enumerate(whole.split(SIZE))}
    many = await _push_times(small, 12)
    one = await _push_times({"w": whole}, 12)

    assert many[0] <= 5
    assert median(many[2:]) <= 0.5
    assert median(many[2:]) <= 20 * median(one[2:]) + 0.05
