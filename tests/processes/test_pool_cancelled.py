"""Pushes to several replicas are cancelled, on one trainer rank or on all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

import weightsync
from tests.processes.driven import MIB, census
from tests.processes.rig import MODES, SECONDS, open_job

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.processes.rig import Job

LONG = 60.0
"""All ranks are in this process, where each looks at every byte."""

DELAYS = (0.001, 0.005, 0.05)
ENDS = (asyncio.CancelledError, weightsync.ClosedError, weightsync.PushReport)


class Got(NamedTuple):
    """A version, and the one value of all bytes."""

    version: int
    value: int | None


class Pool:
    """Two trainer ranks and a replica of each mode, one of them of two ranks."""

    def __init__(self, job: Job, numel: int) -> None:
        self.version = 0
        self.got: dict[str, list[Got]] = {}
        self._job = job
        self._source = torch.zeros(numel, dtype=torch.uint8)
        self._numel = numel

    async def join(self, stack: AsyncExitStack) -> None:
        """Let all replicas join, and receive whatever comes."""
        for mode, ranks in zip(MODES, (2, 1, 1), strict=True):
            weights = [
                torch.zeros(self._numel, dtype=torch.uint8) for _ in range(ranks)
            ]
            dicts = [{"w": weight} for weight in weights]
            found = await self._job.join(*dicts, mode=mode, replica=mode)
            for rank, (weight, each) in enumerate(zip(weights, found, strict=True)):
                got = self.got[f"{mode}-{rank}"] = []
                task = asyncio.create_task(_receive(each, weight, got))
                stack.callback(task.cancel)

    def begin(self) -> list[asyncio.Task[weightsync.PushReport]]:
        """Start the next version on both trainer ranks."""
        self.version += 1
        self._source.fill_(self.version)
        return [asyncio.create_task(self._push(rank)) for rank in range(2)]

    def _push(self, rank: int) -> Coroutine[None, None, weightsync.PushReport]:
        return self._job.trainers[rank].push(
            {"w": self._source}, version=self.version, require="all", timeout=SECONDS
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
        low, high = weight.view(torch.int64).aminmax()
        value = int(weight[0]) if low == high else None
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
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.002):
            await first
    ended = (await asyncio.gather(second, return_exceptions=True))[0]

    assert isinstance(ended, ENDS), ended


@pytest.mark.timeout(150)
@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize(
    "numel", [16 * MIB, pytest.param(256 * MIB, marks=pytest.mark.slow)]
)
def test_a_push_cancelled_at_any_moment_leaves_every_replica_whole_and_in_the_pool(
    who: list[int], numel: int, caplog: pytest.LogCaptureFixture
) -> None:
    unhandled: list[object] = []
    seconds: list[float] = []

    async def main() -> Pool:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        async with open_job(trainers=2) as job, AsyncExitStack() as stack:
            pool = Pool(job, numel)
            await pool.join(stack)
            await pool.deliver()
            tasks, before = len(asyncio.all_tasks()), census()
            for delay in DELAYS:
                seconds.append(await _cancel(pool, who, delay))
                await pool.deliver()
            await _time_out(pool)
            await pool.deliver()
            after = census()

            assert tasks == len(asyncio.all_tasks())
            assert after.descriptors - before.descriptors <= 2
            assert after.threads - before.threads <= 2
        gc.collect()
        return pool

    pool = asyncio.run(main())

    assert max(seconds) < 2.0
    assert pool.got["staged-0"] == pool.got["staged-1"]
    for got in pool.got.values():
        versions = [version for version, _ in got]
        assert [Got(version, version) for version in versions] == got
        assert sorted(set(versions)) == versions
    assert [] == unhandled
    assert [] == [record for record in caplog.records if record.levelname == "ERROR"]
