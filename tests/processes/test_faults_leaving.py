"""Generators come and go in every way; the others, and those to come, do not notice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import MIB, ask, call

if TYPE_CHECKING:
    from tests.processes.harness import Child, Control, Processes

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, torch, weightsync.blocking
weight = torch.zeros(1 << 20, dtype=torch.uint8).to(sys.argv[3])
with weightsync.blocking.Generator(
    sys.argv[1], {"w": weight}, replica="leaver", rank=0, world_size=1
) as generator:
    print(generator.receive().version, int(weight[0]), flush=True)
    if sys.argv[2] == "raise":
        raise ValueError("mine")
"""


async def _leaves(control: Control, address: str, how: str) -> None:
    weight = torch.zeros(MIB, dtype=torch.uint8)
    async with weightsync.Generator(
        address, {"w": weight}, replica="leaver", rank=0, world_size=1, timeout=20
    ) as transport:
        await transport.receive()
        control.say("received")
        if how == "vanish":
            os._exit(0)
        if how == "exit":
            sys.exit(0)


def _push(trainer: Child, generators: list[Child], version: int) -> set[str]:
    for generator in generators:
        ask(generator, "receive", timeout=5)
    pushed = call(trainer, "push", version=version, timeout=5)

    assert "ok" == pushed.kind, pushed
    assert pushed.seconds < 2
    for generator in generators:
        assert version == generator.hear().value.version
        assert (version, version) == call(generator, "held").value
    return set(pushed.value.delivered)


def _count(trainer: Child, count: int) -> None:
    assert call(trainer, "wait_for_replicas", count=count, timeout=20).kind == "ok"


@pytest.mark.parametrize("how", ["close", "exit", "vanish", "program", "raise"])
def test_the_end_of_a_generator_disturbs_no_other(
    how: str, processes: Processes, address: str
) -> None:
    before = driven.in_shared_memory()
    trainer = processes.start(driven.trainer, address, 0, 1, MIB)
    stays = processes.start(driven.generator, address, "stays", 0, 1, MIB)

    assert ["open"] * 2 == [trainer.hear(), stays.hear()]
    program: subprocess.Popen[str] | None = None
    if how in {"program", "raise"}:
        device = torch.empty(0).device.type
        program = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, address, how, device],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    else:
        child = processes.start(_leaves, address, how)
    _count(trainer, 2)

    assert {"stays", "leaver"} == _push(trainer, [stays], 1)
    if program is not None:
        out, err = program.communicate(timeout=20)

        assert "1 1\n" == out
        assert ("mine" in err) == (how == "raise")
        assert "Warning" not in err
        assert "leaked" not in err
    else:
        assert "received" == child.hear()
        child.join()
    assert "stays" in _push(trainer, [stays], 2)

    joins = processes.start(driven.generator, address, "joins", 0, 1, MIB)

    assert "open" == joins.hear()
    _count(trainer, 2)
    assert {"stays", "joins"} == _push(trainer, [stays, joins], 3)
    assert driven.close(trainer, stays, joins) < 5
    assert before == driven.in_shared_memory()


class _Job:
    """Two trainer ranks in this process."""

    def __init__(self, first: weightsync.Trainer, second: weightsync.Trainer) -> None:
        self.ranks = (first, second)

    async def push(self, *states: dict[str, object]) -> list[Exception | None]:
        """Push on both ranks; return what each raised."""
        raised: list[Exception | None] = [None, None]

        async def one(rank: int) -> None:
            try:
                await self.ranks[rank].push(states[rank], timeout=5)
            except weightsync.WeightSyncError as error:
                raised[rank] = error

        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(one, rank)
        return raised


def test_a_fault_of_one_rank_is_raised_on_every_rank(address: str) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    weight = torch.full((3, 4), -777.0)

    def check(raised: list[Exception | None], kind: type, *parts: str) -> None:
        for error in raised:
            assert isinstance(error, kind), raised
            for part in parts:
                assert part in str(error)

    async def main() -> None:
        async with weightsync.Trainer(address, rank=0, world_size=2) as first:
            async with weightsync.Trainer(address, rank=1, world_size=2) as second:
                job = _Job(first, second)
                started = time.monotonic()
                check(
                    await job.push({"w": whole}, {"w": whole}),
                    weightsync.PeerError,
                    "no replica has joined",
                )
                generator = weightsync.Generator(
                    address, {"w": weight}, replica="gen", rank=0, world_size=1
                )
                async with generator:
                    await first.wait_for_replicas(1)
                    meta = torch.empty(3, 4, device="meta")
                    check(
                        await job.push({"w": whole}, {"w": meta}),
                        weightsync.WeightSyncError,
                        "'w'",
                        "meta",
                        "trainer rank 1",
                    )
                    check(
                        await job.push({"w": whole}, {"w": whole[:2].clone()}),
                        weightsync.PlanError,
                        "'w'",
                        "(3, 4)",
                        "(2, 4)",
                    )
                    check(
                        await job.push({"w": whole}, {"w": None}),
                        weightsync.DtypeError,
                        "'w'",
                        "trainer rank 1",
                    )
                    assert [-777.0] * 12 == weight.flatten().tolist()
                    assert generator.version is None
                    assert [None, None] == await job.push({"w": whole}, {"w": whole})
                    assert 1 == (await generator.receive(timeout=5)).version
                assert time.monotonic() - started < 10

    anyio.run(main)

    assert torch.equal(whole, weight)
