"""``replay=True``: whoever joins gets the last version at once, byte for byte."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress

import anyio
import pytest
import torch

import weightsync
from tests.processes.engines import slow_on_nccl
from tests.processes.in_child import in_child
from tests.processes.replays import (
    COLUMNS,
    ROWS,
    Sources,
    columns,
    come,
    empty,
    holds,
    keeping,
    next_event,
    same,
)
from tests.processes.rig import (
    MODES,
    SECONDS,
    Job,
    Mode,
    on,
    open_job,
    receive_all,
    together,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("mode", MODES)
@in_child
async def test_a_replica_that_joins_after_push_3_gets_version_3_at_once(
    device: str,
    mode: Mode,
) -> None:
    async with open_job(2, device, replay=True) as job:
        events = job.trainers[1].events()
        first = await job.join_one(empty(device))
        sources = Sources(device)
        for version in (1, 2, 3):
            await sources.push(job, version)
            await first.receive(timeout=SECONDS)
        late = await job.join(*columns(device), mode=mode)
        updates = await receive_all(late)
        held = [holds(rank, one, 3) for rank, one in enumerate(late)]
        membership = await job.trainers[1].membership()
        seen = [await anext(events) for _ in range(2)]
        follows = await together(
            lambda: sources.push(job, 4), lambda: receive_all(late)
        )
        after = [holds(rank, one, 4) for rank, one in enumerate(late)]

    assert [3, 3] == [update.version for update in updates]
    assert [True, True] == held
    assert [3, 3] == [each.version for each in membership.replicas.values()]
    assert ["joined", "joined"] == [event.kind for event in seen]
    assert ("gen-0", "gen-1") == follows[0].delivered
    assert [True, True] == after


@slow_on_nccl
@in_child
async def test_without_replay_a_replica_is_not_ready_until_the_next_push(
    device: str,
) -> None:
    async with open_job(2, device) as job:
        await job.join_one(empty(device))
        sources = Sources(device)
        await sources.push(job, 1)
        late = await job.join_one(empty(device), mode="swap")
        with pytest.raises(weightsync.TimedOutError):
            await late.receive(timeout=0.3)
        before = late.version
        await job.trainers[0].membership()
        report = await sources.push(job, 2, on_busy="skip")
        update = await late.receive(timeout=SECONDS)

    assert None is before
    assert "gen-1" in report.delivered
    assert 2 == update.version


class Traffic:
    """Pushes back to back, a replica that stays, and others that come and go."""

    def __init__(self, job: Job, device: str, seed: int) -> None:
        self._job = job
        self._device = device
        self._seed = seed
        self._done = anyio.Event()
        self.seen: list[list[int]] = []

    async def push(self) -> None:
        sources, version = Sources(self._device), 0
        while not self._done.is_set():
            version += 1
            on_busy = "skip" if self._seed else "wait"
            await sources.push(self._job, version, on_busy=on_busy)

    async def stay(self, generator: weightsync.Generator) -> None:
        while not self._done.is_set():
            with suppress(weightsync.TimedOutError):
                await generator.receive(timeout=0.02)

    async def guests(self) -> None:
        for number in range(9):
            async with AsyncExitStack() as stack:
                ranks = [
                    await stack.enter_async_context(generator)
                    for generator in self._guest(number)
                ]
                self.seen.append([await self._receive(ranks) for _ in range(3)])
        self._done.set()

    def _guest(self, number: int) -> list[weightsync.Generator]:
        return [
            weightsync.Generator(
                self._job.address,
                state_dict,
                replica=f"guest-{number}",
                rank=rank,
                world_size=2,
                mode=MODES[(number + self._seed) % 3],
                timeout=SECONDS,
            )
            for rank, state_dict in enumerate(columns(self._device))
        ]

    async def _receive(self, ranks: list[weightsync.Generator]) -> int:
        updates = await receive_all(ranks)
        (version,) = {update.version for update in updates}
        assert [True, True] == [holds(r, each, version) for r, each in enumerate(ranks)]
        return int(version)


@pytest.mark.parametrize("seed", range(3))
@slow_on_nccl
@in_child
async def test_who_joins_beside_pushes_never_gets_an_old_version_after_a_new_one(
    device: str,
    seed: int,
) -> None:
    async with open_job(2, device, replay=True) as job:
        traffic = Traffic(job, device, seed)
        staying = await job.join_one(empty(device), replica="staying")
        outcomes = await together(
            traffic.push, lambda: traffic.stay(staying), traffic.guests
        )

    assert [None] * 3 == outcomes
    assert 9 == len(traffic.seen)
    for versions in traffic.seen:
        assert sorted(set(versions)) == versions


@slow_on_nccl
@in_child
async def test_a_replica_that_the_kept_version_does_not_fit_stays_unready(
    device: str,
) -> None:
    async with keeping(device) as (job, sources, _):
        number = (await job.trainers[0].membership()).number
        other = await job.join_one(
            on(device, 3, {"w": torch.zeros(ROWS, COLUMNS)}), replica="other"
        )
        event = await next_event(job, "unready", number)
        found = (await job.trainers[0].membership()).replicas["other"]
        await other.aclose()
        await next_event(job, "left", number)
        report = await sources.push(job, 2, on_busy="skip")

    assert ("replica", "other") == (event.role, event.name)
    assert "unexpected: 'b'" in event.reason
    assert ("active", None) == (found.state, found.version)
    assert ("gen-0",) == (*report.delivered, *report.skipped)


@pytest.mark.anyio
async def test_what_is_cast_is_cast_again() -> None:
    source = {"w": torch.linspace(-3, 3, 40)}
    half = {"w": source["w"].to(torch.bfloat16)}
    async with open_job(replay=True) as job:
        await job.join_one({"w": torch.zeros(40, dtype=torch.bfloat16)})
        await job.push(source, version=7, cast=True)
        source["w"].zero_()
        late = await job.join_one({"w": torch.zeros(40, dtype=torch.bfloat16)})
        update = await late.receive(timeout=SECONDS)
        with late.use() as weights:
            exact = same(weights.tensors["w"], half["w"])

    assert 7 == update.version
    assert exact


@slow_on_nccl
@in_child
async def test_names_that_share_memory_on_the_replica_are_compared_again(
    device: str,
) -> None:
    memory = on(device, 3, {"memory": torch.zeros(8)})["memory"]
    tied = {"x": memory, "y": memory}
    source = {"x": torch.ones(8), "y": torch.ones(8)}

    async def push() -> None:
        await job.push(*[on(device, rank, source) for rank in range(2)])

    async with open_job(2, device, replay=True) as job:
        first = await job.join_one(
            on(device, 2, {name: torch.zeros(8) for name in source})
        )
        await push()
        await first.receive(timeout=SECONDS)
        late = await come(job, tied, "alike")
        update = await late.receive(timeout=SECONDS)
        await late.aclose()
        source["y"].fill_(2)
        number = (await job.trainers[0].membership()).number
        await push()
        await come(job, tied, "unlike")
        event = await next_event(job, "unready", number)

    assert 1 == update.version
    assert "unlike" == event.name
    assert "share one storage" in event.reason


@pytest.mark.anyio
async def test_trainer_ranks_that_differ_in_replay_are_refused() -> None:
    async with weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=2) as leader:
        other = weightsync.Trainer(
            leader.address, rank=1, world_size=2, replay=True, timeout=SECONDS
        )
        with pytest.raises(weightsync.PlanError, match="started with replay=True"):
            async with other:
                pass
