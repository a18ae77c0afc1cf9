"""How streams of versions end, and who may call from where."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
import trio

import weightsync
import weightsync.blocking
from tests.processes.rig import MODES, SECONDS, Mode, open_job, receive_all, together

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes


def full(value: float, size: int = 8) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(value))}


@pytest.mark.anyio
@pytest.mark.parametrize("ranks", [1, 2])
async def test_iteration_ends_when_the_trainer_closes(ranks: int) -> None:
    weights = [full(-777) for _ in range(ranks)]
    seen: list[list[int]] = [[] for _ in range(ranks)]
    async with open_job(2) as job:
        generators = await job.join(*weights)

        async def iterate(rank: int) -> None:
            async for update in generators[rank]:
                seen[rank].append(update.version)

        async def train() -> None:
            for value in (1, 2, 3):
                await job.push(full(value))
            for trainer in reversed(job.trainers):
                await trainer.aclose()

        with anyio.fail_after(10):
            await together(train, *[lambda r=r: iterate(r) for r in range(ranks)])

    assert [[1, 2, 3]] * ranks == seen
    assert all(weight["w"].tolist() == [3.0] * 8 for weight in weights)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["staged", "swap"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_whole_version_is_received_after_the_trainer_has_closed(
    mode: Mode, ranks: int
) -> None:
    weights = [full(-777) for _ in range(ranks)]
    async with open_job() as job:
        generators = await job.join(*weights, mode=mode)
        await job.push(full(1))
        await job.trainers[0].aclose()
        updates = await receive_all(generators)
        async for _ in generators[0]:
            raise AssertionError("there is no further version")
        ends = await receive_all(generators[1:])
        again = await receive_all(generators, timeout=0.5)
        with generators[0].use() as held:
            version = held.version

    assert [1] * ranks == [update.version for update in updates]
    assert [weightsync.ClosedError] * (ranks - 1) == [type(end) for end in ends]
    assert [weightsync.TimedOutError] * ranks == [type(error) for error in again]
    assert 1 == version
    assert all(weight["w"].tolist() == [1.0] * 8 for weight in weights)


@pytest.mark.anyio
async def test_a_generator_that_waits_hears_that_the_trainer_closed() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))

        async def close() -> None:
            await anyio.sleep(0.1)
            await job.trainers[0].aclose()

        outcome, _ = await together(lambda: generator.receive(timeout=10), close)

    assert isinstance(outcome, weightsync.ClosedError)
    assert "the trainer closed" in str(outcome)


@pytest.mark.anyio
async def test_a_generator_closed_by_another_task_ends_its_iteration() -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))

        async def iterate() -> str:
            async for _ in generator:
                raise AssertionError("there is no version")
            return "ended"

        async def close() -> None:
            await anyio.sleep(0.1)
            await generator.aclose()

        outcome, _ = await together(iterate, close)

    assert "ended" == outcome


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_a_replica_that_leaves_and_comes_back_gets_the_next_version(
    mode: Mode,
) -> None:
    weights = full(-777)
    async with open_job(2) as job:
        for value in (1, 2, 3):
            generator = weightsync.Generator(
                job.address, weights, replica="gen-0", mode=mode, timeout=SECONDS
            )
            async with generator:
                for trainer in job.trainers:
                    await trainer.wait_for_replicas(1, timeout=SECONDS)
                (update,) = await job.deliver(generator, full(value))
                assert (value, [float(value)] * 8) == (
                    update.version,
                    weights["w"].tolist(),
                )
            with anyio.fail_after(5):
                while any(trainer.replicas for trainer in job.trainers):
                    await anyio.sleep(0.005)

    assert [3.0] * 8 == weights["w"].tolist()


@pytest.mark.anyio
async def test_waiting_for_replicas_says_who_has_joined() -> None:
    async with open_job() as job:
        await job.join_one(full(-777), replica="first")
        names = await job.trainers[0].wait_for_replicas(1, timeout=5)
        started = anyio.current_time()
        with pytest.raises(
            weightsync.TimedOutError, match="for 2 replicas; 1 joined: first"
        ):
            await job.trainers[0].wait_for_replicas(2, timeout=0.3)
        seconds = anyio.current_time() - started
        replicas = job.trainers[0].replicas

    assert ("first",) == names == replicas
    assert 0.3 <= seconds <= 1.3


def test_a_transport_survives_the_loops_that_use_it() -> None:
    weights, seen = full(-777), []
    trainer = weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=1)
    asyncio.run(trainer.__aenter__())
    generator = weightsync.Generator(trainer.address, weights, replica="gen-0")
    asyncio.run(generator.__aenter__())

    async def step(value: float) -> None:
        await trainer.wait_for_replicas(1, timeout=10)
        await trainer.push(full(value))
        update = await generator.receive(timeout=10)
        seen.append((update.version, weights["w"].tolist()))

    try:
        for value in (1, 2, 3):
            asyncio.run(step(value))
        trio.run(step, 4)
        other = threading.Thread(target=asyncio.run, args=(step(5),))
        other.start()
        other.join()
    finally:
        asyncio.run(generator.aclose())
        trio.run(trainer.aclose)

    assert [(v, [float(v)] * 8) for v in (1, 2, 3, 4, 5)] == seen


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_the_blocking_transports_do_the_same(mode: Mode) -> None:
    weights, seen = full(-777), []
    with weightsync.blocking.Trainer(
        "tcp://127.0.0.1:0", rank=0, world_size=1
    ) as trainer:
        with weightsync.blocking.Generator(
            trainer.address, weights, replica="gen-0", mode=mode
        ) as generator:
            names = trainer.wait_for_replicas(1, timeout=10)
            before = (generator.version, generator.pending)
            for value in (1, 2):
                report = trainer.push(full(value))
                update = generator.receive(timeout=10)
                with generator.use() as held:
                    seen.append((report.version, update.version, held.version))
            with pytest.raises(weightsync.TimedOutError):
                generator.receive(timeout=0.1)
            with pytest.raises(weightsync.PlanError, match="'x'"):
                trainer.push({"x": torch.zeros(1)})
            trainer.push(full(3))
            trainer.close()
            rest = [update.version for update in generator]

    assert (("gen-0",), (None, None)) == (names, before)
    assert [(1, 1, 1), (2, 2, 2)] == seen
    assert [3] == rest
    assert [3.0] * 8 == weights["w"].tolist()


def _blocking_trainer(control: Control, address: str, rank: int) -> list[Any]:
    with weightsync.blocking.Trainer(address, rank=rank, world_size=2) as trainer:
        trainer.wait_for_replicas(1, timeout=SECONDS)
        reports = [trainer.push(full(value)) for value in (1, 2, 3)]
        control.hear()
    return [(r.version, r.nbytes, r.seconds, r.delivered) for r in reports]


def _blocking_generator(control: Control, address: str) -> list[Any]:
    weights, seen = full(-777), []
    with weightsync.blocking.Generator(address, weights, replica="gen-0") as generator:
        for update in generator:
            with generator.use() as held:
                seen.append((update.version, held.tensors["w"].tolist()))
            if update.version == 3:
                break
    return seen


def test_blocking_processes_need_no_event_loop(
    processes: Processes, address: str
) -> None:
    generator = processes.start(_blocking_generator, address)
    trainers = [processes.start(_blocking_trainer, address, rank) for rank in range(2)]
    seen = generator.result()
    for trainer in trainers:
        trainer.say("end")
    reports = [trainer.result() for trainer in trainers]

    assert [(v, [float(v)] * 8) for v in (1, 2, 3)] == seen
    assert reports[0] == reports[1]
