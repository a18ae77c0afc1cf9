"""Observers are let in to look, and whatever they do, the job goes on."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
import torch

import weightsync
from tests.processes.rig import SECONDS, Job, open_job
from weightsync import channel
from weightsync.hellos import ObserverHello
from weightsync.membership import AskMembership
from weightsync.messages import (
    Leaving,
    ToObserver,
    Withdraw,
)
from weightsync.peer import Sign
from weightsync.pool import MAX_OBSERVERS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.harness import Control, Processes
    from weightsync.channel import Channel

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def leader_of(job: Job) -> Any:
    """The leader, from its inside."""
    return job.trainers[0]._core.session._leader


async def admit(job: Job, lease: float = 10.0) -> Channel[Any]:
    """Be an observer, by hand."""
    endpoint = job.trainers[0]._core.session._listener.endpoint
    body = msgspec.msgpack.encode(ObserverHello(lease))
    return await channel.connect(endpoint, body, ToObserver | Sign, timeout=SECONDS)


async def until_alone(job: Job) -> None:
    """Wait until the leader has no observer any more."""
    with anyio.fail_after(SECONDS):
        while leader_of(job).members.observers:
            await anyio.sleep(0.01)


async def check_pushes(job: Job, generator: weightsync.Generator, first: int) -> None:
    """Five versions arrive, quickly and byte for byte."""
    for version in range(first, first + 5):
        started = time.monotonic()
        source = torch.full((1000,), float(version))
        await job.deliver(generator, {"w": source}, version=version)
        with generator.use() as weights:
            assert torch.equal(source, weights.tensors["w"])
        assert time.monotonic() - started < 2.0


async def test_an_observer_that_asks_and_never_reads_is_dropped() -> None:
    async with open_job() as job:
        generator = await job.join_one({"w": torch.zeros(1000)})
        stuck = await admit(job)

        async def flood() -> None:
            with pytest.raises(weightsync.WeightSyncError):
                while True:
                    await stuck.send(AskMembership(1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood)
            await check_pushes(job, generator, 1)
        await until_alone(job)
        await check_pushes(job, generator, 6)
        await stuck.aclose()


async def test_an_observer_that_says_nothing_is_dropped_and_told() -> None:
    async with open_job() as job:
        generator = await job.join_one({"w": torch.zeros(1000)})
        silent = await admit(job, lease=0.5)
        await until_alone(job)
        await check_pushes(job, generator, 1)
        said: list[Any] = []
        with pytest.raises(weightsync.PeerError):
            while True:
                said.append(await silent.receive())
        await silent.aclose()

    assert "Farewell" == type(said[-1]).__name__
    assert "Beat" in {type(message).__name__ for message in said}


async def test_an_observer_that_says_what_it_may_not_is_dropped() -> None:
    async with open_job() as job:
        generator = await job.join_one({"w": torch.zeros(1000)})
        rogue = await admit(job)
        await rogue.send(Withdraw())
        await until_alone(job)
        await check_pushes(job, generator, 1)
        await rogue.aclose()


async def test_more_observers_than_the_limit_are_refused_until_one_goes() -> None:
    async with open_job() as job:
        admitted = [await admit(job) for _ in range(MAX_OBSERVERS)]
        with anyio.fail_after(SECONDS):
            while len(leader_of(job).members.observers) < MAX_OBSERVERS:
                await anyio.sleep(0.01)
        with pytest.raises(weightsync.PeerError, match="64 observers already"):
            async with weightsync.Observer(job.address, timeout=SECONDS):
                pass
        await admitted[0].send(Leaving())
        with anyio.fail_after(SECONDS):
            while len(leader_of(job).members.observers) == MAX_OBSERVERS:
                await anyio.sleep(0.01)
        async with weightsync.Observer(job.address, timeout=SECONDS) as watch:
            assert 1 == (await watch.membership()).world_size
        for each in admitted:
            await each.aclose()


async def _watch(control: Control, address: str) -> str:
    async with weightsync.Observer(address, timeout=SECONDS, lease=1.0) as watch:
        control.say("open")
        await control.ahear()
        try:
            await watch.membership()
        except weightsync.PeerError as error:
            return str(error)
    return "nothing was raised"


async def test_a_frozen_observer_is_dropped_and_knows_when_it_wakes(
    processes: Processes,
) -> None:
    async with open_job() as job:
        generator = await job.join_one({"w": torch.zeros(1000)})
        child = processes.start(_watch, job.address)

        assert "open" == await anyio.to_thread.run_sync(child.hear)
        child.kill(signal.SIGSTOP)
        await check_pushes(job, generator, 1)
        await until_alone(job)
        child.kill(signal.SIGCONT)
        child.say("go on")
        told = await anyio.to_thread.run_sync(child.result)

    assert "removed this process, which gave no sign of life for 1 s" in told


async def test_an_observer_of_a_job_that_is_not_there_changes_nothing(
    address: str, tmp_path: Path
) -> None:
    for missing in (address, f"file://{tmp_path}/store"):
        with pytest.raises(weightsync.TimedOutError, match="no store at"):
            async with weightsync.Observer(missing, timeout=0.5):
                pass

    assert [] == list(tmp_path.iterdir())


async def test_an_observer_in_the_process_of_a_generator_sees_its_job() -> None:
    async with open_job() as job:
        await job.join_one({"w": torch.zeros(4)}, replica="gen")
        async with weightsync.Observer(job.address, timeout=SECONDS) as watch:
            found = await watch.membership()

    assert ("gen",) == found.active
