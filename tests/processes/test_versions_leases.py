"""Read leases: the version is pinned while one lasts, and a switch waits for it."""

from __future__ import annotations

import threading
import time

import anyio
import anyio.to_thread
import pytest
import torch

import weightsync
from tests.processes.rig import MODES, Mode, open_job, together

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def full(value: float, size: int = 8) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(value))}


@pytest.mark.parametrize("mode", MODES)
async def test_a_switch_waits_for_the_lease(mode: Mode) -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, full(1))
        found = []
        async with anyio.create_task_group() as group:
            with generator.use() as held:
                group.start_soon(job.deliver, generator, full(2))
                for _ in range(10):
                    await anyio.sleep(0.01)
                    found.append((held.version, set(held.tensors["w"].tolist())))
        after = (generator.version, set(weights["w"].tolist()))

    assert [(1, {1.0})] * 10 == found
    assert (2, {2.0}) == after


async def test_what_waits_for_a_lease_says_so_when_it_times_out() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))
        await job.push(full(1))
        with generator.use(), generator.use():
            with pytest.raises(
                weightsync.TimedOutError, match="version 1 waits for 2 read leases"
            ):
                await generator.receive(timeout=0.2)
        pending = generator.pending
        update = await generator.receive(timeout=5)

    assert (1, 1) == (pending, update.version)


async def test_leases_nest_while_a_version_waits() -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights)
        await job.push(full(1))
        async with anyio.create_task_group() as group:
            async with generator.use() as outer:
                group.start_soon(generator.receive)
                await anyio.sleep(0.05)
                with anyio.fail_after(2):
                    async with generator.use() as inner:
                        versions = (outer.version, inner.version)

                def in_a_thread() -> int | None:
                    with generator.use() as nested:
                        return nested.version

                with anyio.fail_after(2):
                    threaded = await anyio.to_thread.run_sync(in_a_thread)
        after = generator.version

    assert (None, None) == versions
    assert (None, 1) == (threaded, after)


@pytest.mark.parametrize("readers", [4])
async def test_overlapping_readers_do_not_keep_a_version_out(readers: int) -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights)
        ended = anyio.Event()

        async def read(number: int) -> None:
            await anyio.sleep(0.01 * number)
            while not ended.is_set():
                async with generator.use():
                    await anyio.sleep(0.04)

        async with anyio.create_task_group() as group:
            for number in range(readers):
                group.start_soon(read, number)
            await anyio.sleep(0.1)
            for value in (1, 2, 3):
                await job.push(full(value))
                await generator.receive(timeout=5)
            ended.set()

    assert [3.0] * 8 == weights["w"].tolist()


async def test_overlapping_threads_do_not_keep_a_version_out() -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights)
        ended = threading.Event()

        def read(number: int) -> None:
            time.sleep(0.01 * number)
            while not ended.is_set():
                with generator.use():
                    time.sleep(0.04)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            for value in (1, 2, 3):
                await job.push(full(value))
                await generator.receive(timeout=5)
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    assert [3.0] * 8 == weights["w"].tolist()


@pytest.mark.parametrize("mode", ["staged", "swap"])
async def test_threads_read_one_version_at_a_time(mode: Mode) -> None:
    size = 1 << 18
    weights = full(0, size)
    ended = threading.Event()
    seen: list[tuple[int, float, float]] = []

    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)

        def read() -> None:
            while not ended.is_set():
                with generator.use() as held:
                    low, high = held.tensors["w"].aminmax()
                    seen.append((held.version or 0, low.item(), high.item()))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for version in range(1, 31):
                await job.deliver(generator, full(version, size))
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    assert [] == [found for found in seen if len({float(x) for x in found}) != 1]
    assert len({version for version, _, _ in seen}) > 3


async def test_a_lease_outlives_the_close_of_its_generator() -> None:
    async with open_job() as job:
        generator = weightsync.Generator(job.address, full(5))
        async with generator:
            lease = generator.use()
            held = lease.__enter__()
        lease.__exit__(None, None, None)
        with pytest.raises(weightsync.ClosedError):
            generator.use().__enter__()

    assert [5.0] * 8 == held.tensors["w"].tolist()


async def test_a_lease_is_entered_once_at_a_time() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))
        lease = generator.use()
        with lease, pytest.raises(weightsync.ClosedError, match="once at a time"):
            lease.__enter__()
        with lease as held:
            version = held.version
        await job.deliver(generator, full(1))

    assert version is None


async def test_a_cancelled_reader_gives_its_lease_back() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))
        with anyio.move_on_after(0.05):
            async with generator.use():
                await anyio.sleep_forever()
        (update,) = await job.deliver(generator, full(1))

    assert 1 == update.version


async def test_a_reader_cancelled_while_it_waits_holds_nothing() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))
        await job.push(full(1))

        async def wait_for_a_lease() -> None:
            with anyio.move_on_after(0.1) as scope:
                async with generator.use():
                    await anyio.sleep_forever()
            cancelled.append(scope.cancelled_caught)

        cancelled: list[bool] = []
        held = generator.use()
        held.__enter__()

        async def let_go() -> None:
            await anyio.sleep(0.3)
            held.__exit__(None, None, None)

        # The task that waits must not inherit the lease of this one.
        results = await together(
            lambda: generator.receive(timeout=5), wait_for_a_lease, let_go
        )

    assert [True] == cancelled
    assert 1 == results[0].version
