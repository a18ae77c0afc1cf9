"""A push or a receive is cancelled: both sides stay usable and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes.driven import MIB, census, timed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DELAYS = [0, 0.001, 0.005, 0.02, 0.05]
NUMEL = 64 * MIB

both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Job:
    """Two trainer ranks and a generator in this process, and what arrived."""

    def __init__(
        self,
        trainers: tuple[weightsync.Trainer, weightsync.Trainer],
        generator: weightsync.Generator,
        source: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        self.trainers = trainers
        self.generator = generator
        self.source = source
        self.weight = weight
        self.version = 0
        self.received: list[tuple[int, int | None]] = []

    def begin(self) -> int:
        """The caller's next step: new values in the same tensors."""
        self.version += 1
        self.source.fill_(self.version)
        return self.version

    async def push(self, rank: int, version: int) -> weightsync.PushReport:
        return await self.trainers[rank].push(
            {"w": self.source}, version=version, timeout=5
        )

    async def both_push(self) -> None:
        version = self.begin()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.push, 0, version)
            report = await self.push(1, version)

        assert ("gen",) == report.delivered

    async def receive_all(self) -> None:
        async for update in self.generator:
            uniform = bool((self.weight == self.weight[0]).all())
            value = int(self.weight[0]) if uniform else None
            self.received.append((update.version, value))


@asynccontextmanager
async def _job(address: str, numel: int = NUMEL) -> AsyncIterator[Job]:
    source = torch.zeros(numel, dtype=torch.uint8)
    weight = torch.zeros(numel, dtype=torch.uint8)
    async with weightsync.Trainer(address, rank=0, world_size=2, timeout=20) as first:
        second = weightsync.Trainer(address, rank=1, world_size=2, timeout=20)
        generator = weightsync.Generator(
            address, {"w": weight}, replica="gen", rank=0, world_size=1, timeout=20
        )
        async with second, generator:
            await first.wait_for_replicas(1)
            yield Job((first, second), generator, source, weight)


def _check(job: Job) -> None:
    """Whole versions only, each with its own bytes, increasing, the last one last."""
    versions = [version for version, _ in job.received]

    assert [(version, version) for version in versions] == job.received
    assert sorted(set(versions)) == versions
    assert job.version == versions[-1]


async def _wait_for(job: Job, version: int) -> None:
    with anyio.fail_after(5):
        while not job.received or job.received[-1][0] < version:
            await anyio.sleep(0.002)


@pytest.mark.parametrize(
    ("who", "backend"),
    [([0], "asyncio"), ([0], "trio"), ([1], "asyncio"), ([0, 1], "trio")],
)
def test_a_cancelled_push_ends_everywhere_and_the_next_one_works(
    who: list[int],
    backend: str,
    address: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cancelled(job: Job, rank: int, version: int, delay: float) -> None:
        started = anyio.current_time()
        with anyio.move_on_after(delay if rank in who else 20):
            ended = await timed(job.push(rank, version))

            assert ended.kind in {"ok", "ClosedError"}
            if ended.kind != "ok":
                assert "was cancelled on trainer rank" in ended.value
        assert anyio.current_time() - started < delay + 2

    async def main() -> None:
        async with _job(address) as job, anyio.create_task_group() as tasks:
            tasks.start_soon(job.receive_all)
            await job.both_push()
            await _wait_for(job, job.version)
            before = census()
            for delay in DELAYS:
                version = job.begin()
                async with anyio.create_task_group() as pushes:
                    for rank in range(2):
                        pushes.start_soon(cancelled, job, rank, version, delay)
                await job.both_push()
                await _wait_for(job, job.version)
            after = census()

            assert after.descriptors - before.descriptors <= 2
            assert after.threads - before.threads <= 2
            _check(job)
            tasks.cancel_scope.cancel()
        gc.collect()

    anyio.run(main, backend=backend)

    assert [] == [record for record in caplog.records if record.levelname == "ERROR"]


@both_backends
def test_a_cancelled_receive_loses_no_version(backend: str, address: str) -> None:
    async def main() -> None:
        async with _job(address, MIB) as job:
            await job.both_push()

            assert 1 == (await job.generator.receive()).version

            before = census()
            for delay in DELAYS:
                with anyio.move_on_after(delay) as scope:
                    await job.generator.receive()
                assert scope.cancelled_caught
                await job.both_push()

                assert job.version == (await job.generator.receive(timeout=5)).version
                assert job.version == job.weight[0]
            with pytest.raises(weightsync.TimedOutError):
                await job.generator.receive(timeout=0.01)
            after = census()

            assert after.descriptors - before.descriptors <= 2
            assert after.threads - before.threads <= 2

    anyio.run(main, backend=backend)


def test_a_receive_that_is_cancelled_while_versions_come_takes_or_leaves_one(
    address: str,
) -> None:
    async def main() -> None:
        async with _job(address, 32 * MIB) as job:
            for delay in [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05]:
                got: weightsync.Update | None = None
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(job.both_push)
                    with anyio.move_on_after(delay):
                        got = await job.generator.receive()
                if got is None and job.generator.version != job.version:
                    got = await job.generator.receive(timeout=5)

                assert job.version == job.generator.version
                assert bool((job.weight == job.version).all())

    asyncio.run(main())


async def _time_out_on_one_rank(job: Job) -> None:
    version = job.begin()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await job.push(0, version)  # rank 1 does not push
    with pytest.raises(weightsync.ClosedError, match="cancelled"):
        await job.push(1, version)
    await job.both_push()


def test_a_cancelled_asyncio_task_and_an_asyncio_timeout_leave_no_task(
    address: str,
) -> None:
    unhandled: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        async with _job(address) as job:
            receiver = asyncio.create_task(job.receive_all())
            await job.both_push()
            tasks = len(asyncio.all_tasks())
            for delay in DELAYS:
                version = job.begin()
                other = asyncio.create_task(job.push(1, version))
                task = asyncio.create_task(job.push(0, version))
                await asyncio.sleep(delay)
                started = time.monotonic()
                task.cancel()
                done = await asyncio.gather(task, other, return_exceptions=True)

                assert time.monotonic() - started < 2
                expected = (
                    asyncio.CancelledError,
                    weightsync.ClosedError,
                    weightsync.PushReport,
                )
                assert all(isinstance(outcome, expected) for outcome in done)
                await job.both_push()
            await _time_out_on_one_rank(job)
            await _wait_for(job, job.version)

            assert tasks == len(asyncio.all_tasks())
            _check(job)
            receiver.cancel()
        gc.collect()

    asyncio.run(main())

    assert [] == unhandled


@both_backends
def test_a_transport_that_is_left_by_a_cancellation_closes_everything(
    backend: str, address: str
) -> None:
    async def main() -> None:
        for cycle in range(4):
            with anyio.move_on_after(0.05):
                async with _job(address, MIB):
                    await anyio.sleep_forever()
            gc.collect()  # warns of a listener, and of a channel, that is not closed
            if cycle == 0:  # what a GPU opens at its first use, it keeps
                before = census()
        after = census()

        assert after.descriptors - before.descriptors <= 2
        assert after.threads - before.threads <= 2

    anyio.run(main, backend=backend)


@both_backends
def test_opening_is_cancelled_at_once_where_no_store_answers(
    backend: str, address: str
) -> None:
    async def main() -> float:
        started = anyio.current_time()
        with anyio.move_on_after(0.2):
            async with weightsync.Generator(
                address, {"w": torch.zeros(4)}, replica="gen", rank=0, timeout=30
            ):
                pass
        return anyio.current_time() - started

    seconds = anyio.run(main, backend=backend)

    assert seconds < 5.0
