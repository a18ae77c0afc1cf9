"""Pushes given up at any moment, while replicas of every mode read."""

from __future__ import annotations

import random
from functools import partial

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import MODES, Job, open_job, together

pytestmark = pytest.mark.anyio

SIZE = 1 << 20
Seen = list[tuple[int, float]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def model(value: float) -> dict[str, torch.Tensor]:
    return {"large": torch.full((SIZE,), value), "small": torch.full((5,), value)}


async def _push_and_give_up(job: Job, pushes: int, chance: random.Random) -> None:
    for value in range(1, pushes + 1):
        seconds = chance.choice([0.001, 0.003, 0.01, 0.02, 20.0])
        with anyio.move_on_after(seconds):
            outcomes = await job.outcomes(model(float(value)))
            assert outcomes[0] == outcomes[1]
    await job.push(model(0.0))


async def _read(generator: weightsync.Generator, seen: Seen) -> None:
    while not seen or seen[-1][1] != 0.0:
        try:
            update = await generator.receive(timeout=0.02)
        except weightsync.TimedOutError:
            continue
        async with generator.use() as held:
            bounds = [tensor.aminmax() for tensor in held.tensors.values()]
        assert update.version == held.version
        assert 1 == len({bound.item() for pair in bounds for bound in pair})
        seen.append((update.version, bounds[0][0].item()))


@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]]
)
async def test_pushes_that_are_given_up_leave_whole_versions_everywhere(
    seed: int,
) -> None:
    seen: dict[tuple[str, int], Seen] = {}
    async with open_job(trainers=2) as job:
        reads = []
        for mode, ranks in zip(MODES, (2, 1, 2), strict=True):
            generators = await job.join(
                *[model(-777.0) for _ in range(ranks)], mode=mode, replica=mode
            )
            for rank, generator in enumerate(generators):
                seen[mode, rank] = []
                reads.append(partial(_read, generator, seen[mode, rank]))
        push = partial(_push_and_give_up, job, 40, random.Random(seed))
        await together(push, *reads)
        replicas = job.trainers[0].replicas

    assert MODES == replicas
    for (mode, _), found in seen.items():
        versions = [version for version, _ in found]
        assert seen[mode, 0] == found
        assert sorted(set(versions)) == versions
    # One number never means two versions, on whatever replica.
    everything = {pair for found in seen.values() for pair in found}
    assert len({version for version, _ in everything}) == len(everything)
