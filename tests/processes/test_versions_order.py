"""Versions: given or counted, increasing, whole, and the same for everybody."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import weightsync
from tests.processes.rig import (
    MODES,
    Job,
    Mode,
    Source,
    open_job,
    receive_all,
    together,
    until_pending,
)

pytestmark = pytest.mark.anyio

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def full(value: float, size: int = 8) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(value))}


async def test_versions_are_counted_from_the_last_one() -> None:
    async with open_job(2) as job:
        generator = await job.join_one(full(-777))
        found = []
        for given in (None, None, 10, None, 12, None):
            reports = await job.push(full(1), version=given)
            update = await generator.receive(timeout=10)
            found.append((reports[0].version, reports[1].version, update.version))

    assert [(v, v, v) for v in (1, 2, 10, 11, 12, 13)] == found


@pytest.mark.parametrize("version", [7, 6, 1])
async def test_a_version_that_does_not_increase_is_refused(version: int) -> None:
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, full(1), version=7)
        outcomes = await job.outcomes(full(2), version=version)
        held = (generator.version, generator.pending, weights["w"].tolist())
        (update,) = await job.deliver(generator, full(3))

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all(f"version {version} " in str(error) for error in outcomes)
    assert (7, None, [1.0] * 8) == held
    assert 8 == update.version


async def test_trainer_ranks_that_name_different_versions_are_refused() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        first, second = job.trainers
        outcomes = await together(
            lambda: first.push(full(1), version=1),
            lambda: second.push(full(1), version=2),
        )
        untouched = weights["w"].tolist()
        (update,) = await job.deliver(generator, full(3))

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("version is 1 on rank 0 and 2 on rank 1" in str(e) for e in outcomes)
    assert [-777.0] * 8 == untouched
    assert 1 == update.version


async def test_all_trainer_ranks_get_the_same_report() -> None:
    async with open_job(3) as job:
        ready = await job.join_one(full(-777))
        busy = await job.join_one(full(-777))
        await job.push(full(1))
        await ready.receive(timeout=10)
        reports = await job.push(full(2), on_busy="skip")
        (update,) = await receive_all([ready])
        late = await busy.receive(timeout=10)

    assert reports[0] == reports[1] == reports[2]
    assert (("gen-0",), ("gen-1",), {}) == (
        reports[0].delivered,
        reports[0].skipped,
        reports[0].failed,
    )
    assert (2, 32) == (reports[0].version, reports[0].nbytes)
    assert 0 < reports[0].bandwidth
    assert "busy" in reports[0].replicas["gen-1"].reason
    assert (2, 1) == (update.version, late.version)


async def test_skipping_leaves_a_busy_replica_at_its_version() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.push(full(1))
        skipped = await job.push(full(2), on_busy="skip")
        await until_pending(generator, 1)
        update = await generator.receive(timeout=10)
        held = (update.version, weights["w"].tolist())
        # The slot is free again: whoever says so comes before the next push, or waits.
        (later,) = await job.deliver(generator, full(3))

    assert [("gen-0",)] * 2 == [report.skipped for report in skipped]
    assert (1, [1.0] * 8) == held
    assert [3.0] * 8 == weights["w"].tolist()
    assert later.version > 1


async def test_a_push_waits_until_the_version_before_is_switched_in() -> None:
    async with open_job(2) as job:
        generator = await job.join_one(full(-777))
        await job.push(full(1))
        with anyio.move_on_after(0.2) as waited:
            await job.push(full(2))
        first = await generator.receive(timeout=10)
        results = await together(
            lambda: job.push(full(3)), lambda: generator.receive(timeout=10)
        )

    assert waited.cancelled_caught
    assert 1 == first.version
    assert results[0][0].version == results[1].version


async def test_a_push_to_a_replica_that_stays_busy_times_out_and_the_next_works() -> (
    None
):
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.push(full(1))
        started = anyio.current_time()
        outcomes = await job.outcomes(full(2), timeout=0.5)
        seconds = anyio.current_time() - started
        pending = generator.pending
        await generator.receive(timeout=10)
        (update,) = await job.deliver(generator, full(3))

    assert [weightsync.TimedOutError] * 2 == [type(error) for error in outcomes]
    assert all("'gen-0'" in str(error) for error in outcomes)
    assert 0.5 <= seconds <= 3.5
    assert 1 == pending
    assert [3.0] * 8 == weights["w"].tolist()
    assert update.version > 1


async def test_a_trainer_rank_that_does_not_push_ends_the_push_of_the_others() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        first, second = job.trainers
        with pytest.raises(weightsync.TimedOutError, match="trainer rank 1 did not"):
            await first.push(full(1), timeout=0.3)
        # The rank that comes late hears what became of that push.
        with pytest.raises(weightsync.TimedOutError, match="trainer rank 1 did not"):
            await second.push(full(1), timeout=5)
        (update,) = await job.deliver(generator, full(3))

    assert (1, [3.0] * 8) == (update.version, weights["w"].tolist())


@pytest.mark.parametrize("rounds", [10])
async def test_every_round_waits_for_all_ranks(rounds: int) -> None:
    weights = full(-777)
    halves = [
        weightsync.Shard(torch.zeros(4), global_shape=(8,), offsets=(offset,))
        for offset in (0, 4)
    ]
    seen = []
    async with open_job(2) as job:
        generator = await job.join_one(weights)

        async def push(rank: int) -> None:
            for version in range(1, rounds + 1):
                halves[rank].tensor.fill_(version)
                if rank == 1 and version in (2, 5, 9):
                    await anyio.sleep(0.2)
                await job.trainers[rank].push({"w": halves[rank]}, timeout=20)
                halves[rank].tensor.fill_(-1)

        async def receive() -> None:
            async for update in generator:
                seen.append((update.version, weights["w"].tolist()))
                if update.version == rounds:
                    return

        await together(lambda: push(0), lambda: push(1), receive)

    assert [(v, [float(v)] * 8) for v in range(1, rounds + 1)] == seen


async def _pushes_at_once(job: Job, first: Any, second: Any) -> list[Any]:
    (trainer,) = job.trainers
    return await together(
        lambda: trainer.push(first, timeout=10),
        lambda: trainer.push(second, timeout=10),
    )


async def test_two_pushes_at_once_on_one_trainer_are_one_after_the_other() -> None:
    weights = full(-777, 1 << 20)
    async with open_job() as job:
        generator = await job.join_one(weights)
        found = []

        async def receive() -> None:
            for _ in range(2):
                update = await generator.receive(timeout=10)
                found.append((update.version, set(weights["w"].tolist())))

        async def push() -> Any:
            return await _pushes_at_once(job, full(1, 1 << 20), full(2, 1 << 20))

        reports, _ = await together(push, receive)

    assert [1, 2] == sorted(report.version for report in reports)
    values = {report.version: float(i + 1) for i, report in enumerate(reports)}
    assert [(1, {values[1]}), (2, {values[2]})] == found


async def test_pushes_in_opposite_order_on_two_ranks_are_refused() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        first, second = job.trainers
        outcomes = await together(
            lambda: first.push(full(1), version=1, timeout=5),
            lambda: first.push(full(2), version=2, timeout=5),
            lambda: second.push(full(2), version=2, timeout=5),
            lambda: second.push(full(1), version=1, timeout=5),
        )
        untouched = weights["w"].tolist()
        (update,) = await job.deliver(generator, full(3))

    assert [weightsync.PlanError] * 4 == [type(error) for error in outcomes]
    assert [-777.0] * 8 == untouched
    assert (1, [3.0] * 8) == (update.version, weights["w"].tolist())


@pytest.mark.parametrize("mode", MODES)
async def test_a_source_may_change_as_soon_as_push_has_returned(mode: Mode) -> None:
    source, weights = full(0, MIB), full(-777, MIB)
    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)

        async def push() -> None:
            for version in range(1, 11):
                source["w"].fill_(version)
                await job.push(source)
                source["w"].fill_(-1)

        async def receive() -> list[set[float]]:
            seen = []
            for _ in range(10):
                await generator.receive(timeout=10)
                seen.append(set(weights["w"].unique().tolist()))
            return seen

        _, seen = await together(push, receive)

    assert [{float(version)} for version in range(1, 11)] == seen


async def test_a_push_keeps_what_the_caller_dropped() -> None:
    size = 16 * MIB
    weights = full(-777, size)
    async with open_job() as job:
        generator = await job.join_one(weights)
        async with anyio.create_task_group() as group:
            group.start_soon(job.trainers[0].push, full(1, size))
            await anyio.lowlevel.checkpoint()
            gc.collect()
            others = [torch.full((size,), 3.0) for _ in range(3)]
        await generator.receive(timeout=10)

    assert {1.0} == set(weights["w"].unique().tolist())
    assert 3 == len(others)


async def test_a_hundred_pushes_leave_the_source_as_it_was() -> None:
    drifting = torch.full((64,), 1.0, dtype=torch.bfloat16)
    pushed = {
        "w": torch.nn.Parameter(drifting),
        "t": torch.arange(12.0).view(3, 4).t(),
        "n": torch.full((2,), float("nan")),
    }
    pushed["w"].grad = torch.ones_like(pushed["w"])
    source = Source(pushed)
    weights = {name: torch.zeros_like(tensor) for name, tensor in pushed.items()}
    weights = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        for _ in range(100):
            await job.deliver(generator, pushed)

    assert source.untouched


async def _alternate(rounds: int) -> int:
    weights = full(-777, 1)
    async with open_job() as job:
        generator = await job.join_one(weights)
        source = full(0, 1)
        for version in range(1, rounds + 1):
            source["w"].fill_(version)
            await job.trainers[0].push(source, timeout=10)
            update = await generator.receive(timeout=10)
            if (version, version) != (update.version, weights["w"].item()):
                return version
    return rounds


async def test_a_version_pushed_before_the_wait_is_received_at_once() -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights)
        await job.push(full(1))
        await until_pending(generator, 1)
        started = anyio.current_time()
        await generator.receive(timeout=10)
        seconds = anyio.current_time() - started

    assert seconds < 1


async def test_no_wake_up_is_lost_in_many_alternations() -> None:
    assert 200 == await _alternate(200)


@pytest.mark.slow
async def test_no_wake_up_is_lost_in_two_thousand_alternations() -> None:
    assert 2000 == await _alternate(2000)


async def test_a_replica_that_joins_late_is_not_ready_before_the_next_version() -> None:
    early, late = full(-777), full(-777)
    async with open_job(2) as job:
        first = await job.join_one(early)
        for value in (1, 2, 3):
            await job.deliver(first, full(value))
        second = await job.join_one(late)
        before = (second.version, second.pending)
        with second.use() as held:
            seen = (held.version, held.tensors["w"].tolist())
        await together(
            lambda: job.deliver(first, full(4)), lambda: second.receive(timeout=10)
        )

    assert (None, None) == before
    assert (None, [-777.0] * 8) == seen
    assert [4.0] * 8 == late["w"].tolist()
