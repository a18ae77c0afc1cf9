"""A push that converts takes no more memory than its scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import torch

import weightsync
from tests.processes.driven import MIB, resident_mib
from weightsync.casting import HALF_BYTES

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

NUMEL = 16 * MIB  # 64 MiB in fp32, 32 MiB in bf16
SCRATCH_MIB = 2 * HALF_BYTES / MIB
PUSHES = 3


async def _highest(found: list[float]) -> None:
    while True:
        found.append(resident_mib())
        await anyio.sleep(0.001)


async def _push(control: Control, address: str) -> Any:
    """Return by how much the memory rose at most, and by how much it ended higher."""
    source = torch.ones(NUMEL)
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.wait_for_replicas(1)
        warm = {"w": torch.ones(NUMEL, dtype=torch.bfloat16)}
        await transport.push(warm, timeout=20)  # what any push needs, but for casts
        before = resident_mib()
        found: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_highest, found)
            for number in range(PUSHES):
                source.fill_(number)
                await transport.push({"w": source}, cast=True, timeout=20)
            tasks.cancel_scope.cancel()
        return max(found) - before, resident_mib() - before


async def _receive(control: Control, address: str) -> Any:
    weight = torch.zeros(NUMEL, dtype=torch.bfloat16)
    async with weightsync.Generator(
        address, {"w": weight}, replica="gen", rank=0, world_size=1, timeout=20
    ) as transport:
        values: list[float] = []
        while len(values) <= PUSHES:
            await transport.receive(timeout=20)
            uniform = bool((weight == weight[0]).all())
            values.append(float(weight[0]) if uniform else -1.0)
    return values


def test_converting_takes_its_scratch_and_no_copy_of_the_tensor(
    processes: Processes, address: str
) -> None:
    trainer = processes.start(_push, address)
    generator = processes.start(_receive, address)
    rise, left = trainer.result(50)

    assert [1.0, *range(PUSHES)] == generator.result(20)
    assert rise <= SCRATCH_MIB + 16
    assert left <= SCRATCH_MIB + 16
