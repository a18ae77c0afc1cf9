"""``replay=True``: whoever joins gets the last version at once, byte for byte."""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.driven import census
from tests.processes.rig import (
    MODES,
    SECONDS,
    Job,
    Mode,
    open_job,
    receive_all,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.membership import MembershipEvent

pytestmark = pytest.mark.anyio

ROWS, COLUMNS = 12, 10


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def whole(version: int) -> dict[str, torch.Tensor]:
    """The model of a version: any bytes, NaNs among them."""
    chance = torch.Generator().manual_seed(version)
    data = torch.randint(0, 256, (ROWS * COLUMNS * 4,), generator=chance)
    w = data.to(torch.uint8).view(torch.float32).view(ROWS, COLUMNS)
    return {"w": w, "b": torch.full((5,), version, dtype=torch.int64)}


class Sources:
    """What two trainer ranks push: rows of ``w``, and all of ``b``."""

    def __init__(self) -> None:
        half = ROWS // 2
        self._parts = [torch.zeros(half, COLUMNS) for _ in range(2)]
        self._bias = torch.zeros(5, dtype=torch.int64)
        shape = (ROWS, COLUMNS)
        self.ranks: list[Mapping[str, Any]] = [
            {
                "w": weightsync.Shard(
                    part, global_shape=shape, offsets=(rank * half, 0)
                ),
                "b": self._bias,
            }
            for rank, part in enumerate(self._parts)
        ]

    def fill(self, version: int) -> None:
        model = whole(version)
        for part, rows in zip(self._parts, model["w"].chunk(2), strict=True):
            part.view(torch.int32).copy_(rows.contiguous().view(torch.int32))
        self._bias.copy_(model["b"])

    async def push(self, job: Job, version: int, **options: Any) -> Any:
        """Push, and overwrite what was pushed as soon as that returns."""
        self.fill(version)
        reports = await job.push(*self.ranks, version=version, **options)
        self.fill(10_000 + version)
        return reports[0]


def columns() -> list[Mapping[str, Any]]:
    """What two ranks of a replica receive into: columns of ``w``, and all of ``b``."""
    width = COLUMNS // 2
    return [
        {
            "w": weightsync.Shard(
                torch.zeros(ROWS, width),
                global_shape=(ROWS, COLUMNS),
                offsets=(0, rank * width),
            ),
            "b": torch.zeros(5, dtype=torch.int64),
        }
        for rank in range(2)
    ]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bytes are equal, also those of NaNs."""
    return torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def holds(rank: int, generator: weightsync.Generator, version: int) -> bool:
    """Whether a rank of the replica holds its columns of a version."""
    model = whole(version)
    with generator.use() as weights:
        columns = model["w"].chunk(2, dim=1)[rank]
        found = weights.tensors
        return same(found["w"], columns) and same(found["b"], model["b"])


@pytest.mark.parametrize("mode", MODES)
async def test_a_replica_that_joins_after_push_3_gets_version_3_at_once(
    mode: Mode,
) -> None:
    async with open_job(trainers=2, replay=True) as job:
        events = job.trainers[1].events()
        first = await job.join_one(whole(0))
        sources = Sources()
        for version in (1, 2, 3):
            await sources.push(job, version)
            await first.receive(timeout=SECONDS)
        late = await job.join(*columns(), mode=mode)
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


async def test_without_replay_a_replica_is_not_ready_until_the_next_push() -> None:
    async with open_job(trainers=2) as job:
        await job.join_one(whole(0))
        sources = Sources()
        await sources.push(job, 1)
        late = await job.join_one(whole(0), mode="swap")
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

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._seed = seed
        self._done = anyio.Event()
        self.seen: list[list[int]] = []

    async def push(self) -> None:
        sources, version = Sources(), 0
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
            for rank, state_dict in enumerate(columns())
        ]

    async def _receive(self, ranks: list[weightsync.Generator]) -> int:
        updates = await receive_all(ranks)
        (version,) = {update.version for update in updates}
        assert [True, True] == [holds(r, each, version) for r, each in enumerate(ranks)]
        return int(version)


@pytest.mark.parametrize("seed", range(3))
async def test_who_joins_beside_pushes_never_gets_an_old_version_after_a_new_one(
    seed: int,
) -> None:
    async with open_job(trainers=2, replay=True) as job:
        traffic = Traffic(job, seed)
        staying = await job.join_one(whole(0), replica="staying")
        outcomes = await together(
            traffic.push, lambda: traffic.stay(staying), traffic.guests
        )

    assert [None] * 3 == outcomes
    assert 9 == len(traffic.seen)
    for versions in traffic.seen:
        assert sorted(set(versions)) == versions


async def come(
    job: Job, state_dict: Mapping[str, Any], replica: str
) -> weightsync.Generator:
    """Join, and wait for nothing."""
    generator: weightsync.Generator = await job.enter(
        weightsync.Generator(job.address, state_dict, replica=replica, timeout=SECONDS)
    )
    return generator


async def next_event(job: Job, kind: str, number: int) -> MembershipEvent:
    """The next event of a kind after a number."""
    with anyio.fail_after(SECONDS):
        async for event in job.trainers[0].events(after=number):
            if event.kind == kind:
                return event
    raise AssertionError


async def test_a_replica_that_the_kept_version_does_not_fit_stays_unready() -> None:
    async with open_job(trainers=2, replay=True) as job:
        sources = Sources()
        await job.join_one(whole(0))
        await sources.push(job, 1)
        number = (await job.trainers[0].membership()).number
        other = await job.join_one({"w": torch.zeros(ROWS, COLUMNS)}, replica="other")
        event = await next_event(job, "unready", number)
        found = (await job.trainers[0].membership()).replicas["other"]
        await other.aclose()
        await next_event(job, "left", number)
        report = await sources.push(job, 2, on_busy="skip")

    assert ("replica", "other") == (event.role, event.name)
    assert "unexpected: 'b'" in event.reason
    assert ("active", None) == (found.state, found.version)
    assert ("gen-0",) == (*report.delivered, *report.skipped)


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


async def test_names_that_share_memory_on_the_replica_are_compared_again() -> None:
    memory = torch.zeros(8)
    tied = {"x": memory, "y": memory}
    source = {"x": torch.ones(8), "y": torch.ones(8)}
    async with open_job(trainers=2, replay=True) as job:
        first = await job.join_one({name: torch.zeros(8) for name in source})
        await job.push(source)
        await first.receive(timeout=SECONDS)
        late = await come(job, tied, "alike")
        update = await late.receive(timeout=SECONDS)
        await late.aclose()
        source["y"].fill_(2)
        number = (await job.trainers[0].membership()).number
        await job.push(source)
        await come(job, tied, "unlike")
        event = await next_event(job, "unready", number)

    assert 1 == update.version
    assert "unlike" == event.name
    assert "share one storage" in event.reason


async def test_a_partial_push_goes_into_what_is_kept() -> None:
    async with open_job(trainers=2, replay=True) as job:
        sources = Sources()
        first = await job.join_one(whole(0))
        await sources.push(job, 1)
        await first.receive(timeout=SECONDS)
        sources.fill(2)
        part = {"b": sources.ranks[0]["b"]}
        await job.push(part, version=2, partial=True)
        sources.fill(99)
        late = await job.join_one(whole(0))
        update = await late.receive(timeout=SECONDS)
        with late.use() as weights:
            found = {name: held.clone() for name, held in weights.tensors.items()}

    assert 2 == update.version
    assert same(found["w"], whole(1)["w"])
    assert same(found["b"], whole(2)["b"])


async def test_a_partial_push_that_is_cut_otherwise_ends_what_is_kept() -> None:
    async with open_job(trainers=2, replay=True) as job:
        sources = Sources()
        first = await job.join_one(whole(0))
        await sources.push(job, 1)
        await first.receive(timeout=SECONDS)
        await job.push({"w": whole(2)["w"]}, version=2, partial=True)
        await first.receive(timeout=SECONDS)
        late = await job.join_one(whole(0))
        with pytest.raises(weightsync.TimedOutError):
            await late.receive(timeout=0.3)
        await sources.push(job, 3)
        update = await late.receive(timeout=SECONDS)
        later = await job.join_one(whole(0))
        replayed = await later.receive(timeout=SECONDS)

    assert (3, 3) == (update.version, replayed.version)


async def test_a_cancelled_push_leaves_the_version_that_was_kept_before() -> None:
    async with open_job(trainers=2, replay=True) as job:
        sources = Sources()
        first = await job.join_one(whole(0))
        await sources.push(job, 1)
        with anyio.move_on_after(0.2):
            await sources.push(job, 2)  # version 1 is not received: no slot is open
        await first.aclose()
        late = await come(job, whole(0), "late")
        update = await late.receive(timeout=SECONDS)
        with late.use() as weights:
            exact = same(weights.tensors["w"], whole(1)["w"])

    assert 1 == update.version
    assert exact


async def test_trainer_ranks_that_differ_in_replay_are_refused() -> None:
    async with weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=2) as leader:
        other = weightsync.Trainer(
            leader.address, rank=1, world_size=2, replay=True, timeout=SECONDS
        )
        with pytest.raises(weightsync.PlanError, match="started with replay=True"):
            async with other:
                pass


async def test_layouts_that_change_and_jobs_that_end_leave_nothing() -> None:
    async def once() -> None:
        async with open_job(replay=True) as job:
            generator = await job.join_one({"w": torch.zeros(600)})
            for width in (1, 2, 3):
                pieces = {
                    "w": weightsync.Shard(
                        torch.ones(600 * width)[:600], global_shape=(600,), offsets=(0,)
                    )
                }
                await job.push(pieces)
                await generator.receive(timeout=SECONDS)
            for dtype in (torch.float64, torch.float32, torch.float64):
                source = torch.full((600,), 4.0, dtype=dtype)
                await job.push({"w": source}, cast=True)
                await generator.receive(timeout=SECONDS)

    await once()
    gc.collect()
    before = census()
    for _ in range(3):
        await once()
    gc.collect()
    after = census()

    assert before.descriptors == after.descriptors
    assert before.threads == after.threads
