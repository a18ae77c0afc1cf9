"""Event loops keep running while weights move, and an idle transport costs nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes.driven import MIB

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

BEAT = 0.005


class Heart:
    """A heartbeat in this event loop, and its largest gap."""

    def __init__(self) -> None:
        self.gap = 0.0

    async def __aenter__(self) -> Heart:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(4 * BEAT)
        self.gap = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT)
            now = time.monotonic()
            self.gap = max(self.gap, now - last)
            last = now


async def _trainer(control: Control, address: str, nbytes: int) -> list[float]:
    tensors = {f"layer.{i}": torch.ones(nbytes // 8 // 4) for i in range(8)}
    gaps: list[float] = []
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.wait_for_replicas(1)
        for version in (1, 2, 3):
            async with Heart() as heart:
                await transport.push(tensors, version=version)
            gaps.append(heart.gap)
        await control.ahear()
    return gaps


async def _generator(control: Control, address: str, nbytes: int) -> list[float]:
    tensors = {f"layer.{i}": torch.zeros(nbytes // 8 // 4) for i in range(8)}
    gaps: list[float] = []
    async with weightsync.Generator(
        address, tensors, replica="gen", rank=0, world_size=1, timeout=20
    ) as transport:
        for version in (1, 2, 3):
            async with Heart() as heart:
                update = await transport.receive()
            gaps.append(heart.gap)

            assert version == update.version
    return gaps


@pytest.mark.parametrize(
    "nbytes", [256 * MIB, pytest.param(1024 * MIB, marks=pytest.mark.slow)]
)
def test_neither_loop_stands_still_while_weights_move(
    nbytes: int, processes: Processes, address: str
) -> None:
    generator = processes.start(_generator, address, nbytes)
    trainer = processes.start(_trainer, address, nbytes)
    receiving = generator.result(50)
    trainer.say("end")
    pushing = trainer.result(50)

    # The machine itself may stop a process once; it does not do so each time.
    assert min(receiving) < 0.05
    assert min(pushing) < 0.05


async def _idle_generator(control: Control, address: str) -> list[float]:
    async with weightsync.Generator(
        address, {"w": torch.zeros(1000)}, replica="gen", rank=0, world_size=1
    ) as transport:
        waiting = asyncio.create_task(transport.receive(timeout=60))
        await asyncio.sleep(0.2)
        started = time.process_time()
        await asyncio.sleep(3)
        spent = time.process_time() - started
        control.say(spent)
        await waiting
    return []


async def _idle_trainer(control: Control, address: str) -> float:
    async with weightsync.Trainer(address, rank=0, world_size=1) as transport:
        await transport.wait_for_replicas(1)
        started = time.process_time()
        await asyncio.sleep(3)
        spent = time.process_time() - started
        control.say(spent)
        await transport.push({"w": torch.ones(1000)})
        await asyncio.to_thread(control.hear)
    return spent


def test_waiting_costs_no_processor_time(processes: Processes, address: str) -> None:
    generator = processes.start(_idle_generator, address)
    trainer = processes.start(_idle_trainer, address)

    assert generator.hear() < 0.03
    assert trainer.hear() < 0.03
    trainer.say("end")
    generator.result()
    trainer.result()


def test_one_transport_serves_successive_loops_and_other_threads(address: str) -> None:
    weight = torch.zeros(4)
    trainer = weightsync.Trainer(address, rank=0, world_size=1, timeout=20)
    generator = weightsync.Generator(
        address, {"w": weight}, replica="gen", rank=0, world_size=1, timeout=20
    )

    async def begin() -> None:
        await trainer.__aenter__()
        await generator.__aenter__()
        await trainer.wait_for_replicas(1)

    async def step(value: float) -> int:
        await trainer.push({"w": torch.full((4,), value)})
        return (await generator.receive()).version

    async def end() -> None:
        await generator.aclose()
        await trainer.aclose()

    asyncio.run(begin())
    versions = [asyncio.run(step(float(i))) for i in range(3)]
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(asyncio.run(step(9.0))))
    thread.start()
    thread.join(20)

    assert [1, 2, 3, 4] == versions + in_thread
    assert [9.0] * 4 == weight.tolist()
    asyncio.run(end())


def test_a_caller_that_blocks_its_own_loop_holds_up_nobody(address: str) -> None:
    source = torch.arange(8.0)
    weight = torch.zeros(8)

    async def main() -> Any:
        async with weightsync.Trainer(address, rank=0, world_size=1) as trainer:
            generator = weightsync.Generator(
                address, {"w": weight}, replica="gen", rank=0, world_size=1
            )
            async with generator:
                await trainer.wait_for_replicas(1)
                pushing = asyncio.create_task(trainer.push({"w": source}, timeout=5))
                await asyncio.sleep(0)
                deadline = time.monotonic() + 5
                while generator.pending is None and time.monotonic() < deadline:
                    sum(range(1000))  # a training step: the loop stands still
                pending = generator.pending
                await pushing
                return pending, (await generator.receive()).version

    assert (1, 1) == asyncio.run(main())
