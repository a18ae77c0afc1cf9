"""From one process into the memory of another: a window, and a push."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import weightsync
import weightsync.backend

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Control, Processes


def _window_rank(control: Control, rank: int, address: str) -> list[int]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address.rpartition(":")[2])
    dist.init_process_group("weightsync-shm", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    memory = weightsync.Window.allocate(group, 256)
    with weightsync.Window(group, memory) as window:
        if rank == 0:
            window.put(torch.arange(100, dtype=torch.uint8), 1, offset=7).wait()
            found = []
        else:
            window.wait_signal(0, timeout=10).wait()
            found = window.local[7:107].tolist()
    dist.destroy_process_group()
    return found


def test_a_put_and_its_signal_reach_the_other_process(
    processes: Processes, address: str
) -> None:
    ranks = [processes.start(_window_rank, rank, address) for rank in range(2)]

    assert [[], list(range(100))] == [rank.result() for rank in ranks]


async def _trainer(control: Control, address: str, device: str) -> tuple[str, ...]:
    weight = torch.arange(12.0).reshape(3, 4).to(device)
    async with weightsync.Trainer(address, timeout=20) as transport:
        await transport.wait_for_replicas(1)
        report = await transport.push({"w": weight})
        control.say("pushed")
        control.hear()
        return report.delivered


async def _generator(
    control: Control, address: str, device: str
) -> tuple[int, list[list[float]]]:
    weight = torch.full((3, 4), -777.0).to(device)
    async with weightsync.Generator(
        address, {"w": weight}, replica="gen-0", timeout=20
    ) as transport:
        update = await transport.receive()
    return update.version, weight.tolist()


def test_a_pushed_tensor_arrives(
    engine: Engine, processes: Processes, address: str
) -> None:
    generator = processes.start(_generator, address, engine.device)
    trainer = processes.start(_trainer, address, engine.device)
    version, weight = generator.result()
    trainer.say("end")

    assert (1, torch.arange(12.0).reshape(3, 4).tolist()) == (version, weight)
    assert ("gen-0",) == trainer.result()
