"""What a reader sees: whole versions, in order, however fast trainers push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import SECONDS, open_job, together

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

TENSORS = 64
MIB = 1 << 20


def model(value: float, size: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((size,), float(value)) for i in range(TENSORS)}


async def _trainer(
    control: Control, address: str, rank: int, pushes: int, size: int
) -> list[str]:
    async with weightsync.Trainer(
        address, rank=rank, world_size=2, timeout=SECONDS
    ) as transport:
        await transport.wait_for_replicas(1)
        for version in range(1, pushes + 1):
            await transport.push(model(version, size))
        bad = model(pushes + 1, size)
        if rank == 1:
            bad["layer.40"] = torch.zeros(size + 1)
        errors = []
        try:
            await transport.push(bad)
        except weightsync.PlanError as error:
            errors.append(str(error))
        await transport.push(model(pushes + 2, size))
        control.hear()
    return errors


async def _generator(
    control: Control, address: str, mode: str, pushes: int, size: int
) -> list[tuple[int, float, float]]:
    weights = model(0, size)
    seen: list[tuple[int, float, float]] = []

    def look() -> None:
        with transport.use() as held:
            bounds = [tensor.aminmax() for tensor in held.tensors.values()]
            low = min(low.item() for low, _ in bounds)
            high = max(high.item() for _, high in bounds)
            seen.append((held.version or 0, low, high))

    async def read() -> None:
        while not seen or seen[-1][0] < pushes + 1 or len(seen) < 200:
            await anyio.to_thread.run_sync(look)

    async with weightsync.Generator(
        address, weights, replica="gen-0", mode=mode, timeout=SECONDS
    ) as transport:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for _ in range(pushes + 1):
                await transport.receive(timeout=SECONDS)
    return seen


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_every_snapshot_is_one_whole_version(
    processes: Processes, address: str, mode: str
) -> None:
    pushes, size = 30, 16_384
    trainers = [
        processes.start(_trainer, address, rank, pushes, size) for rank in range(2)
    ]
    seen = processes.start(_generator, address, mode, pushes, size).result(50)
    for trainer in trainers:
        trainer.say("end")
    errors = [trainer.result() for trainer in trainers]

    assert len(seen) >= 200
    # The refused push left no trace: its number is that of the good one after it.
    good = {float(v): v for v in range(pushes + 1)} | {pushes + 2.0: pushes + 1}
    assert [] == [(v, a, b) for v, a, b in seen if a != b or good[a] != v]
    assert sorted(v for v, _, _ in seen) == [v for v, _, _ in seen]
    assert errors[0] == errors[1]
    assert "'layer.40'" in errors[0][0]


def _shared_mib() -> float:
    """Shared memory of this process that is in anonymous files."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) / 1024


async def _push_without_pause(
    pushes: int, hold: float
) -> tuple[list[int], float, float]:
    size = 2 * MIB
    weights = {"w": torch.zeros(size)}
    versions, most = [], 0.0
    before = _shared_mib()
    async with open_job() as job:
        generator = await job.join_one(weights)
        ended = 0.0

        async def push() -> None:
            nonlocal ended
            source = torch.empty(size)
            for version in range(1, pushes + 1):
                await job.push({"w": source.fill_(version)})
            ended = anyio.current_time()

        async def read() -> None:
            nonlocal most
            async for update in generator:
                async with generator.use() as held:
                    await anyio.sleep(hold)
                    low, high = held.tensors["w"].aminmax()
                    assert update.version == held.version == low == high
                versions.append(update.version)
                most = max(most, _shared_mib() - before)
                if update.version == pushes:
                    return

        await together(push, read)
        late = anyio.current_time() - ended
    return versions, late, most


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pushes", "hold", "anyio_backend"),
    [(20, 0.02, "asyncio"), pytest.param(200, 0.05, "asyncio", marks=pytest.mark.slow)],
)
async def test_pushing_faster_than_the_reader_reads(pushes: int, hold: float) -> None:
    versions, late, shared_mib = await _push_without_pause(pushes, hold)

    assert list(range(1, pushes + 1)) == versions
    assert late <= 5
    # Both ends map the window in this process: 8 MiB and headers, twice.
    assert shared_mib <= 3 * 8
