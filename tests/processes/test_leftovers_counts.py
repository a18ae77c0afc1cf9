"""Descriptors, mappings, threads and memory stay flat, however long a job runs."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import Census, census, census_at_rest, resident_mib
from tests.processes.harness import Child, Control, Processes, free_address

if TYPE_CHECKING:
    from pathlib import Path

Counts = tuple[Census, float]


def _flat(before: Counts, after: Counts) -> None:
    both = before, after
    assert after[0].streams - before[0].streams <= 2, both
    assert after[0].descriptors - before[0].descriptors <= 2, both
    assert after[0].mappings - before[0].mappings <= 2, both
    assert after[0].threads - before[0].threads <= 2, both
    assert after[1] - before[1] <= 16, both  # MiB


def _count() -> Counts:
    return census_at_rest(0, 1), resident_mib()


async def _push_often(control: Control, address: str, pushes: int) -> Any:
    tensors = {f"layer.{i}": torch.zeros(1000) for i in range(10)}
    counts: list[Counts] = []
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.wait_for_replicas(1)
        for version in range(1, pushes + 1):
            for index, tensor in enumerate(tensors.values()):
                tensor.fill_(version + index)
            await transport.push(tensors, version=version, timeout=5)
            if version in {pushes // 10, pushes}:
                counts.append(_count())
    return counts


async def _receive_often(control: Control, address: str, pushes: int) -> Any:
    tensors = {f"layer.{i}": torch.zeros(1000) for i in range(10)}
    counts: list[Counts] = []
    async with weightsync.Generator(
        address, tensors, replica="gen", rank=0, world_size=1, timeout=20
    ) as transport:
        async for update in transport:
            for index, tensor in enumerate(tensors.values()):
                assert bool((tensor == update.version + index).all())
            if update.version in {pushes // 10, pushes}:
                counts.append(_count())
            if update.version == pushes:
                break
    return counts


@pytest.mark.parametrize("pushes", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_pushes_leave_nothing(
    pushes: int, processes: Processes, address: str
) -> None:
    children = [
        processes.start(_push_often, address, pushes),
        processes.start(_receive_often, address, pushes),
    ]
    for child in children:
        before, after = child.result(50)
        _flat(before, after)


def test_cycles_of_joining_pushing_and_leaving_leave_nothing(address: str) -> None:
    source = torch.arange(1000.0)

    async def main() -> None:
        async with weightsync.Trainer(
            address, rank=0, world_size=1, timeout=20
        ) as trainer:
            for cycle in range(40):
                weight = torch.zeros(1000)
                generator = weightsync.Generator(
                    address, {"w": weight}, replica="gen", rank=0, world_size=1
                )
                async with generator:
                    await trainer.wait_for_replicas(1)
                    await trainer.push({"w": source}, timeout=5)
                    await generator.receive(timeout=5)
                assert torch.equal(source, weight)
                with anyio.fail_after(5):
                    while trainer.replicas:
                        await anyio.sleep(0.002)
                if cycle == 4:
                    before = _count()
            _flat(before, _count())

    anyio.run(main)


def test_opening_and_closing_leaves_nothing(address: str) -> None:
    async def main() -> None:
        for cycle in range(25):
            async with weightsync.Trainer(address, rank=0, world_size=1):
                with pytest.raises(weightsync.PlanError, match="rank"):
                    async with weightsync.Trainer(address, rank=1, world_size=2):
                        pass
                with pytest.raises(weightsync.PeerError, match="cannot serve"):
                    async with weightsync.Trainer(address, rank=0, world_size=1):
                        pass
            if cycle == 4:
                before = _count()
        _flat(before, _count())

    anyio.run(main)


async def _trainer_of_many(control: Control, address: str) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    tensors = {f"layer.{i}": torch.full((16,), float(i)) for i in range(1000)}
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.wait_for_replicas(1)
        await transport.push(tensors, timeout=10)
        return census().descriptors


async def _generator_of_many(control: Control, address: str) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    tensors = {f"layer.{i}": torch.zeros(16) for i in range(1000)}
    async with weightsync.Generator(
        address, tensors, replica="gen", rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.receive()
        found = [bool((tensors[f"layer.{i}"] == i).all()) for i in range(1000)]
        return all(found), census().descriptors


def test_a_thousand_tensors_need_few_descriptors(
    processes: Processes, address: str
) -> None:
    generator = processes.start(_generator_of_many, address)
    trainer = processes.start(_trainer_of_many, address)
    whole, descriptors = generator.result()

    assert whole
    assert descriptors < 64
    assert trainer.result() < 64


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_crash_after_crash_leaves_nothing_and_disturbs_no_other_job(
    kind: str, processes: Processes, address: str, tmp_path: Path
) -> None:
    before = driven.in_shared_memory()
    other = f"file://{tmp_path}/store" if kind == "file" else free_address()

    def start(where: str, numel: int) -> list[Child]:
        found = [
            processes.start(driven.trainer, where, 0, 1, numel),
            processes.start(driven.generator, where, "gen", 0, 1, numel),
        ]
        for child in found:
            assert child.hear() == "open"
        assert driven.call(found[0], "wait_for_replicas", count=1).kind == "ok"
        return found

    def push(job: list[Child], version: int) -> None:
        driven.ask(job[1], "receive", timeout=5)

        assert "ok" == driven.call(job[0], "push", version=version, timeout=5).kind
        assert version == job[1].hear().value.version

    healthy = start(address, 1 << 20)
    for attempt in range(5):
        job = start(other, 64 << 20)
        push(job, 1)
        for child in job:
            child.kill()
        for child in job:
            child.join()
        push(healthy, attempt + 1)

        assert before == driven.in_shared_memory()
    last = start(other, 1 << 20)
    push(last, 1)

    assert driven.close(*last) < 5
    assert driven.close(*healthy) < 5
