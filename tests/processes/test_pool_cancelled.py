"""Pushes to several replicas are cancelled, on one trainer rank or on all of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

import weightsync
from tests.processes.driven import census
from tests.processes.engines import slow_on_nccl
from tests.processes.pools import mebibytes
from tests.processes.rig import MODES, SECONDS, on, open_job

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.processes.engines import Engine
    from tests.processes.harness import Control, Processes
    from tests.processes.rig import Job

LONG = 60.0
"""All ranks are in one process, where each looks at every byte."""

DELAYS = (0.001, 0.005, 0.05)
ENDS = (asyncio.CancelledError, weightsync.ClosedError, weightsync.PushReport)


class Got(NamedTuple):
    """A version, and the one value of all bytes."""

    version: int
    value: int | None


@dataclass
class Found:
    """What a child has seen."""

    seconds: list[float] = field(default_factory=list)
    got: dict[str, list[Got]] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    """What was logged as an error, or retrieved by nobody."""


class Pool:
    """Two trainer ranks and a replica of each mode, one of them of two ranks."""

    def __init__(self, job: Job, numel: int, device: str) -> None:
        self.version = 0
        self.got: dict[str, list[Got]] = {}
        self._job = job
        self._numel = numel
        self._device = device
        self._gpus = iter(range(2, 6))
        empty = torch.zeros(numel, dtype=torch.uint8)
        self._sources = [on(device, rank, {"w": empty}) for rank in range(2)]

    async def join(self, stack: AsyncExitStack) -> None:
        """Let all replicas join, and receive whatever comes."""
        for mode, ranks in zip(MODES, (2, 1, 1), strict=True):
            empty = torch.zeros(self._numel, dtype=torch.uint8)
            dicts = [
                on(self._device, next(self._gpus), {"w": empty.clone()})
                for _ in range(ranks)
            ]
            found = await self._job.join(*dicts, mode=mode, replica=mode)
            for rank, (state, each) in enumerate(zip(dicts, found, strict=True)):
                got = self.got[f"{mode}-{rank}"] = []
                task = asyncio.create_task(_receive(each, state["w"], got))
                stack.callback(task.cancel)

    def begin(self) -> list[asyncio.Task[weightsync.PushReport]]:
        """Start the next version on both trainer ranks."""
        self.version += 1
        for source in self._sources:
            filled = torch.full((self._numel,), self.version, dtype=torch.uint8)
            source["w"].copy_(filled)
        return [asyncio.create_task(self._push(rank)) for rank in range(2)]

    def _push(self, rank: int) -> Coroutine[None, None, weightsync.PushReport]:
        return self._job.trainers[rank].push(
            self._sources[rank], version=self.version, require="all", timeout=SECONDS
        )

    async def deliver(self) -> None:
        """An ordinary push reaches everybody, under its own number."""
        first, second = await asyncio.gather(*self.begin())

        assert first == second
        assert set(MODES) == set(first.delivered)
        async with asyncio.timeout(LONG):
            while any(got[-1:] != [self._last] for got in self.got.values()):
                await asyncio.sleep(0.002)

    @property
    def _last(self) -> Got:
        return Got(self.version, self.version)


async def _receive(
    generator: weightsync.Generator, weight: torch.Tensor, got: list[Got]
) -> None:
    async for update in generator:
        low, high = weight.cpu().view(torch.int64).aminmax()
        value = int(weight[0].cpu()) if low == high else None
        got.append(Got(update.version, value))


async def _cancel(pool: Pool, who: list[int], delay: float) -> float:
    """Cancel a push on some ranks; return the seconds until it has ended on all."""
    pushes = pool.begin()
    await asyncio.sleep(delay)
    started = time.monotonic()
    for rank in who:
        pushes[rank].cancel()
    ended = await asyncio.gather(*pushes, return_exceptions=True)

    assert all(isinstance(end, ENDS) for end in ended), ended
    return time.monotonic() - started


async def _time_out(pool: Pool) -> None:
    """The same by ``asyncio.timeout``, on one rank."""
    first, second = pool.begin()
    with suppress(TimeoutError):
        async with asyncio.timeout(0.002):
            await first
    ended = (await asyncio.gather(second, return_exceptions=True))[0]

    assert first.cancelled()
    assert isinstance(ended, ENDS), ended


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(self.format(record))


async def _cancelled(
    control: Control, device: str, who: list[int], numel: int
) -> Found:
    """Cancel pushes early, late, and in between, and push as usual after each."""
    found = Found()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.said.append(str(context)))
    logging.getLogger().addHandler(_Errors(found.said))
    async with open_job(2, device) as job, AsyncExitStack() as stack:
        pool = Pool(job, numel, device)
        await pool.join(stack)
        await pool.deliver()
        tasks, before = len(asyncio.all_tasks()), census()
        for delay in DELAYS:
            found.seconds.append(await _cancel(pool, who, delay))
            await pool.deliver()
        await _time_out(pool)
        await pool.deliver()
        after = census()
        found.grown = {
            "tasks": len(asyncio.all_tasks()) - tasks,
            "descriptors": after.descriptors - before.descriptors,
            "threads": after.threads - before.threads,
        }
    gc.collect()
    found.got = pool.got
    return found


@slow_on_nccl
@pytest.mark.timeout(200)
@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("size", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_a_push_cancelled_at_any_moment_leaves_every_replica_whole_and_in_the_pool(
    who: list[int], size: int, engine: Engine, processes: Processes
) -> None:
    numel = mebibytes(size, engine)
    found: Found = processes.start(_cancelled, engine.device, who, numel).result(180)

    assert max(found.seconds) < 2.0
    assert found.got["staged-0"] == found.got["staged-1"]
    for got in found.got.values():
        versions = [version for version, _ in got]
        assert [Got(version, version) for version in versions] == got
        assert sorted(set(versions)) == versions
    assert 0 == found.grown["tasks"]
    assert found.grown["descriptors"] <= 2
    assert found.grown["threads"] <= 2
    assert [] == found.said
