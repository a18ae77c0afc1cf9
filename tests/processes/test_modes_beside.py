"""Bytes of registered storages that no push fills keep their value, in every mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.rig import MODES, SECONDS, Mode, open_job, raw
from weightsync.names import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.processes.rig import Job
    from weightsync.names import Rule

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("mode", MODES)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def counted(*shape: int, start: float = 0.0) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + start


def sentinel(*shape: int) -> Tensor:
    return torch.full(shape, -777.0)


async def join(
    job: Job, *ranks: dict[str, Any], mode: Mode, names: Sequence[Sequence[Rule]] = ()
) -> list[weightsync.Generator]:
    """One replica; each rank has its own rules."""
    generators = [
        await job.enter(
            weightsync.Generator(
                *(job.address, state),
                replica="gen-0",
                rank=rank,
                world_size=len(ranks),
                mode=mode,
                names=names[rank] if names else (),
                timeout=SECONDS,
            )
        )
        for rank, state in enumerate(ranks)
    ]
    for trainer in job.trainers:
        await trainer.wait_for_replicas(1, timeout=SECONDS)
    return generators


async def test_a_padded_vocabulary_keeps_its_padding(mode: Mode) -> None:
    ranks = [sentinel(4, 3) for _ in range(2)]
    padding = sentinel(1, 3)
    rules = [[cut("embed", dim=0, index=i, count=2, size=7)] for i in range(2)]
    async with open_job(2) as job:
        states = [{"embed": held} for held in ranks]
        generators = await join(job, *states, mode=mode, names=rules)
        for version in range(1, 6):
            pushed = counted(7, 3, start=100 * version)
            await job.deliver(generators, {"embed": pushed})

            assert raw(pushed[:4]) == raw(ranks[0])
            assert raw(torch.cat([pushed[4:], padding])) == raw(ranks[1])
            if version % 2:
                padding = counted(1, 3, start=-version)
                ranks[1][3:] = padding


async def test_a_part_of_a_longer_storage_leaves_the_rest_to_others(mode: Mode) -> None:
    storage = sentinel(10)
    before, after = storage[:2], storage[8:]
    async with open_job(2) as job:
        (generator,) = await join(job, {"w": storage.narrow(0, 2, 6)}, mode=mode)
        for version in range(1, 6):
            before.fill_(version)
            after[1] += 1
            await job.deliver(generator, {"w": counted(6, start=10 * version)})
            expected = [*[version] * 2, *(10 * version + i for i in range(6)), -777]

            assert [*expected, version - 777] == storage.tolist()
            assert raw(storage[:2]) == raw(before)
            assert raw(storage[8:]) == raw(after)


async def test_padded_columns_keep_their_padding(mode: Mode) -> None:
    whole = sentinel(5, 8)
    holes = torch.ones(5, 8, dtype=torch.bool)
    holes[:, 1:4] = holes[:, 5:7] = False
    views = {"left": whole[:, 1:4], "right": whole[:, 5:7]}
    expected = sentinel(5, 8)
    async with open_job() as job:
        generators = await join(job, views, mode=mode)
        for version in range(1, 6):
            changed = counted(5, 8, start=-100 * version)[holes]
            whole[holes] = expected[holes] = changed
            pushed = {"left": counted(5, 3, start=version)}
            expected[:, 1:4] = pushed["left"]
            if version % 3 == 1:
                pushed["right"] = counted(5, 2, start=50 * version)
                expected[:, 5:7] = pushed["right"]
            await job.deliver(generators, pushed, partial=True)

            assert expected.tolist() == whole.tolist()


async def test_partial_pushes_keep_the_padding_and_the_other_parts(mode: Mode) -> None:
    fused, alone = sentinel(8, 2), sentinel(3)
    state = {"gate": fused[:3], "up": fused[4:7], "alone": alone}
    expected, lone = fused.clone(), alone.clone()
    places = {"gate": expected[:3], "up": expected[4:7], "alone": lone}
    async with open_job(2) as job:
        generators = await join(job, state, mode=mode)
        pushes = ["gate up alone", "gate", "up", "alone", "gate alone", "up", "up gate"]
        for version, names in enumerate(pushes, 1):
            fused[3] = expected[3] = version
            pushed = {
                name: counted(*state[name].shape, start=10 * version)
                for name in names.split()
            }
            for name, tensor in pushed.items():
                places[name].copy_(tensor)
            await job.deliver(generators, pushed, partial=True)

            assert expected.tolist() == fused.tolist()
            assert lone.tolist() == alone.tolist()
