"""Who is in a job, and who came and went: the same for all who ask."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.rig import SECONDS, open_job, together

if TYPE_CHECKING:
    from tests.processes.harness import Processes
    from weightsync import MembershipEvent, PushReport
    from weightsync.events import Events

pytestmark = pytest.mark.anyio

N = 1000


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((N,), value)}


async def take(events: Events, count: int) -> list[MembershipEvent]:
    """The next events of a stream."""
    with anyio.fail_after(SECONDS):
        return [await anext(events) for _ in range(count)]


async def rest(events: Events) -> list[MembershipEvent]:
    """The events of a stream until its end."""
    with anyio.fail_after(SECONDS):
        return [event async for event in events]


def brief(events: list[MembershipEvent]) -> list[tuple[str, str, str]]:
    return [(event.kind, event.role, event.name) for event in events]


def without_times(membership: weightsync.Membership) -> dict[str, Any]:
    """What does not change from one moment to the next."""
    found = msgspec.to_builtins(membership)
    for member in (*found["trainers"], *found["replicas"].values()):
        del member["age"], member["silent"]
        if member.get("push"):
            del member["push"]["ago"]
    return dict(found)


async def test_a_snapshot_says_who_is_there_and_which_version_each_holds() -> None:
    async with open_job(trainers=2) as job:
        pair = await job.join(weights(0), weights(0), replica="pair")
        await job.join_one(weights(0), replica="solo", mode="swap")
        before = await job.trainers[0].membership()
        await job.push(weights(1), version=5)
        for rank in range(2):
            assert (await pair[rank].receive(timeout=SECONDS)).version == 5
        skipped = (await job.push(weights(2), version=7, on_busy="skip"))[0]
        found = [await trainer.membership() for trainer in job.trainers]

    assert ("pair", "solo") == before.active
    assert [None, None] == [r.version for r in before.replicas.values()]
    assert [None, None] == [r.push for r in before.replicas.values()]
    assert without_times(found[0]) == without_times(found[1])
    assert [0, 1] == [trainer.rank for trainer in found[0].trainers]
    assert [None, 10.0] == [trainer.lease for trainer in found[0].trainers]
    assert 2 == found[0].world_size
    assert [
        ("pair", 2, "staged", "active", 10.0),
        ("solo", 1, "swap", "active", 10.0),
    ] == [
        (each.name, each.ranks, each.mode, each.state, each.lease)
        for each in found[0].replicas.values()
    ]
    _check_pushes(found[0], skipped)


def _check_pushes(found: weightsync.Membership, second: PushReport) -> None:
    """Versions and outcomes are those of the last report, whatever it was."""
    held = {name: 7 if name in second.delivered else 5 for name in found.replicas}
    for name, replica in found.replicas.items():
        push = replica.push

        assert push is not None
        assert held[name] == replica.version
        assert (7, second.replicas[name].status) == (push.version, push.status)
        assert second.replicas[name].reason == push.reason
        assert 0 <= push.ago <= replica.age < SECONDS
        assert 0 <= replica.silent < 10.0


async def test_all_trainer_ranks_see_the_same_events_in_the_same_order(
    processes: Processes,
) -> None:
    async with open_job(trainers=2) as job, weightsync.Observer(job.address) as watch:
        streams = [each.events(after=0) for each in (*job.trainers, watch)]
        child = processes.start(driven.generator, job.address, "dies", 0, 1, N)

        assert "open" == await anyio.to_thread.run_sync(child.hear)
        await together(*[lambda t=t: t.wait_for_replicas(1) for t in job.trainers])
        for _ in range(2):  # the second time under the same name
            async with weightsync.Generator(
                job.address, weights(0), replica="goes", timeout=SECONDS
            ):
                await job.trainers[0].wait_for_replicas(2, timeout=SECONDS)
        child.kill()
        seen = [await take(stream, 8) for stream in streams]

    assert seen[0] == seen[1] == seen[2]
    assert list(range(1, 9)) == [event.number for event in seen[0]]
    assert [
        ("joined", "trainer", "0"),
        ("joined", "trainer", "1"),
        ("joined", "replica", "dies"),
        ("joined", "replica", "goes"),
        ("left", "replica", "goes"),
        ("joined", "replica", "goes"),
        ("left", "replica", "goes"),
        ("failed", "replica", "dies"),
    ] == brief(seen[0])
    assert "replica 'dies' closed the connection" == seen[0][-1].reason
    assert {""} == {event.reason for event in seen[0][:-1]}


async def test_nothing_is_missed_between_a_snapshot_and_the_events_after_it() -> None:
    async with open_job() as job:
        (trainer,) = job.trainers
        await job.join_one(weights(0), replica="first")
        now = await trainer.membership()
        await job.join_one(weights(0), replica="second")
        late = trainer.events(after=now.number)
        newest = trainer.events()
        await job.join_one(weights(0), replica="third")
        after_snapshot, after_call = await take(late, 2), await take(newest, 1)

    assert ("first",) == now.active
    assert ["second", "third"] == [event.name for event in after_snapshot]
    assert ["third"] == [event.name for event in after_call]


async def test_a_stream_ends_where_its_transport_or_the_job_is_closed() -> None:
    async with weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=2) as leader:
        other = weightsync.Trainer(leader.address, rank=1, world_size=2)
        async with other, weightsync.Observer(leader.address) as watch:
            mine, theirs = other.events(), watch.events()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rest, mine)
                await anyio.wait_all_tasks_blocked()
                await other.aclose()
            assert [("left", "trainer", "1")] == brief(await take(theirs, 1))
            await leader.aclose()

            assert [] == await rest(theirs)


async def test_a_trainer_rank_that_dies_is_the_last_event_and_then_the_error(
    processes: Processes,
) -> None:
    async with weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=2) as leader:
        child = processes.start(driven.trainer, leader.address, 1, 2, N)
        assert "open" == await anyio.to_thread.run_sync(child.hear)
        async with weightsync.Observer(leader.address) as watch:
            streams = [leader.events(), watch.events()]
            child.kill()
            for stream in streams:
                (event,) = await take(stream, 1)

                assert [("failed", "trainer", "1")] == brief([event])
                with pytest.raises(weightsync.PeerError, match="trainer rank 1 failed"):
                    await take(stream, 1)
            with pytest.raises(weightsync.PeerError, match="trainer rank 1 failed"):
                await watch.membership()


async def test_a_frozen_replica_is_an_event_with_the_reason(
    processes: Processes,
) -> None:
    async with open_job() as job:
        arguments = (job.address, "frail", 0, 1, N, "staged", 1.0)
        child = processes.start(driven.generator, *arguments)
        events = job.trainers[0].events()

        assert "open" == await anyio.to_thread.run_sync(child.hear)
        (joined,) = await take(events, 1)
        lease = (await job.trainers[0].membership()).replicas["frail"].lease
        child.kill(signal.SIGSTOP)
        (failed,) = await take(events, 1)

    assert "joined" == joined.kind
    assert 1.0 == lease
    assert "replica 'frail' gave no sign of life for 1 s" == failed.reason


async def test_a_question_that_is_cancelled_or_out_of_time_leaves_nothing() -> None:
    async with open_job() as job:
        (trainer,) = job.trainers
        for _ in range(20):
            with anyio.move_on_after(0):
                await trainer.membership()
        with anyio.move_on_after(0.01):
            await take(trainer.events(), 1)

        assert 1 == (await trainer.membership()).world_size


def test_the_blocking_ones_are_the_same(processes: Processes, address: str) -> None:
    with weightsync.blocking.Trainer(address, rank=0, world_size=1) as trainer:
        events = trainer.events(after=0)
        child = processes.start(driven.generator, address, "gen", 0, 1, N)

        assert child.hear() == "open"
        trainer.wait_for_replicas(1)
        with weightsync.blocking.Observer(address, timeout=SECONDS) as watch:
            seen = [next(events) for _ in range(2)]
            watched = watch.events(after=0)

            assert seen == [next(watched) for _ in range(2)]
            assert without_times(trainer.membership()) == without_times(
                watch.membership()
            )
            driven.close(child)

            assert "replica 'gen' left" == str(next(events)) == str(next(watched))
            trainer.close()
            assert [] == list(watched)
            assert [] == list(events)
