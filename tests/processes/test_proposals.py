"""Somebody outside says which replicas are in, while pushes run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import timed
from tests.processes.rig import SECONDS, Job, open_job, together

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

pytestmark = pytest.mark.anyio

N = 4096
Seen = list[tuple[int, bool]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def model(version: int) -> dict[str, torch.Tensor]:
    """Any bytes, others in each version."""
    chance = torch.Generator().manual_seed(version)
    return {"w": torch.randint(0, 256, (N,), generator=chance).to(torch.uint8)}


async def come(job: Job, name: str) -> weightsync.Generator:
    """Join, and wait for nothing."""
    generator: weightsync.Generator = await job.enter(
        weightsync.Generator(job.address, model(0), replica=name, timeout=SECONDS)
    )
    return generator


async def _follow(control: Control, address: str, name: str) -> tuple[Seen, list[str]]:
    """Be a replica until the job ends, and come back whenever it is put out."""
    seen: Seen = []
    reasons: list[str] = []
    while True:
        weights = model(0)
        generator = weightsync.Generator(
            address, weights, replica=name, timeout=SECONDS
        )
        try:
            async with generator:
                control.say("in")
                async for update in generator:
                    exact = torch.equal(weights["w"], model(update.version)["w"])
                    seen.append((update.version, exact))
                return seen, reasons
        except weightsync.PeerError as error:
            reasons.append(str(error))


async def _schedule(
    control: Control, address: str, proposals: list[list[str] | None]
) -> list[tuple[str, ...]]:
    """Be a scheduler outside: propose, see it done, let some pushes pass."""
    found: list[tuple[str, ...]] = []
    async with weightsync.Observer(address, timeout=SECONDS) as observer:
        for names in proposals:
            members = await observer.propose(names)
            wanted = set(members.replicas) if names is None else set(names)
            while set(members.active) != wanted or len(wanted - set(members.replicas)):
                await anyio.sleep(0.005)
                members = await observer.membership()
            last = members.version or 0
            while wanted and (members.version or 0) < last + 3:
                await anyio.sleep(0.005)
                members = await observer.membership()
            found.append(members.active)
    return found


async def _push_until(job: Job, done: anyio.Event) -> int:
    version = 0
    while not done.is_set():
        try:
            await job.push(model(version + 1), version=version + 1)
        except weightsync.PeerError as error:
            if "no replica has joined" not in str(error):
                raise
            await anyio.sleep(0.005)
        else:
            version += 1
    return version


async def test_a_scheduler_drives_three_replicas_in_and_out_beside_pushes(
    processes: Processes,
) -> None:
    proposals: list[list[str] | None] = [
        ["a"],
        ["a", "b"],
        ["c"],
        [],
        ["b", "c"],
        None,
    ]
    async with open_job(trainers=2, admit="proposed", replay=True) as job:
        children = [processes.start(_follow, job.address, name) for name in "abc"]
        for child in children:
            assert "in" == await anyio.to_thread.run_sync(child.hear)
        scheduler = processes.start(_schedule, job.address, proposals)
        done = anyio.Event()
        found: list[Any] = []

        async def wait() -> None:
            found.extend(await anyio.to_thread.run_sync(scheduler.result, 50))
            done.set()

        (last, _) = await together(lambda: _push_until(job, done), wait)
    results = [await anyio.to_thread.run_sync(child.result) for child in children]

    everyone = {"a", "b", "c"}
    assert [everyone if names is None else set(names) for names in proposals] == [
        set(names) for names in found
    ]
    assert last > 10
    for seen, _ in results:
        assert {True} == {exact for _, exact in seen}
        # Who comes back may be replayed the version that it had before.
        assert sorted(seen) == seen
    reasons = {reason for _, said in results for reason in said}
    assert "replica 'a' was removed from the pool: proposal 3 does not name it" in (
        reasons
    )


async def test_nobody_is_in_before_the_first_proposal() -> None:
    async with open_job(admit="proposed") as job:
        (trainer,) = job.trainers
        generator = await come(job, "gen")
        before = await trainer.membership()
        outcome = await timed(trainer.push(model(1), timeout=SECONDS))
        after = await trainer.propose(["gen", "later"])
        await trainer.wait_for_replicas(1, timeout=SECONDS)
        await trainer.push(model(1))
        update = await generator.receive(timeout=SECONDS)
        later = await come(job, "later")
        names = await trainer.wait_for_replicas(2, timeout=SECONDS)
        await later.aclose()

    assert weightsync.Proposal(0, ()) == before.proposal
    assert "waiting" == before.replicas["gen"].state
    assert "PeerError" == outcome.kind
    assert "waiting to be proposed: gen" in outcome.value
    assert weightsync.Proposal(1, ("gen", "later")) == after.proposal
    assert 1 == update.version
    assert ("gen", "later") == names


async def test_a_push_under_way_skips_who_is_removed_and_serves_the_others() -> None:
    async with open_job(trainers=2) as job:
        out, stays = await come(job, "out"), await come(job, "stays")
        for trainer in job.trainers:
            await trainer.wait_for_replicas(2, timeout=SECONDS)
        await job.push(model(1))
        await stays.receive(timeout=SECONDS)

        async def remove() -> Any:
            """Once the push waits for "out" alone, which has not received."""
            while (await job.trainers[1].membership()).version != 2:
                await anyio.sleep(0.002)
            return await job.trainers[1].propose(["stays"])

        reports, members = await together(
            lambda: job.push(model(2), version=2, require="all"), remove
        )
        last = await out.receive(timeout=SECONDS)  # what is whole can be received
        outcome = await timed(out.receive(timeout=SECONDS))
        update = await stays.receive(timeout=SECONDS)

    skipped = reports[0].replicas["out"]
    assert reports[0] == reports[1]
    assert ("skipped", True) == (skipped.status, skipped.removed)
    assert "proposal 1 does not name it" == skipped.reason
    assert ("stays",) == reports[0].delivered == members.active
    assert 1 == last.version
    assert "PeerError" == outcome.kind
    assert "proposal 1 does not name it" in outcome.value
    assert 2 == update.version


async def test_a_removed_replica_comes_back_waits_and_is_proposed_again() -> None:
    async with open_job(trainers=2, replay=True) as job:
        trainer = job.trainers[1]
        first = await come(job, "gen")
        for each in job.trainers:
            await each.wait_for_replicas(1, timeout=SECONDS)
        await job.push(model(1))
        await first.receive(timeout=SECONDS)
        await trainer.propose([])
        with pytest.raises(weightsync.PeerError, match="proposal 1 does not name it"):
            await first.receive(timeout=SECONDS)
        await first.aclose()
        again = await come(job, "gen")
        waiting = await trainer.membership()
        with pytest.raises(weightsync.TimedOutError):
            await again.receive(timeout=0.2)
        back = await trainer.propose(None)
        update = await again.receive(timeout=SECONDS)
        with again.use() as weights:
            exact = torch.equal(weights.tensors["w"], model(1)["w"])
        events = [str(event) async for event in _known(trainer)]

    assert "waiting" == waiting.replicas["gen"].state
    assert None is back.proposal
    assert (1, True) == (update.version, exact)
    assert [
        "trainer rank 0 joined",
        "trainer rank 1 joined",
        "replica 'gen' joined",
        "replica 'gen' left: proposal 1 does not name it",
        "replica 'gen' waiting",
        "replica 'gen' joined",
    ] == events


async def _known(trainer: weightsync.Trainer) -> Any:
    """The events up to now."""
    last = (await trainer.membership()).number
    async for event in trainer.events(after=0):
        yield event
        if event.number == last:
            return


async def test_who_waits_may_leave_or_die(processes: Processes) -> None:
    async with open_job(admit="proposed") as job:
        (trainer,) = job.trainers
        events = trainer.events()
        leaves = await come(job, "leaves")
        child = processes.start(driven.generator, job.address, "dies", 0, 1, N)
        assert "open" == await anyio.to_thread.run_sync(child.hear)
        await leaves.aclose()
        child.kill()
        seen = [await anext(events) for _ in range(4)]
        members = await trainer.propose(["leaves", "dies"])

    assert [
        ("waiting", "leaves"),
        ("waiting", "dies"),
        ("left", "leaves"),
        ("failed", "dies"),
    ] == [(event.kind, event.name) for event in seen]
    assert {} == members.replicas


async def test_wrong_names_are_refused_before_anything_changes() -> None:
    async with open_job() as job:
        (trainer,) = job.trainers
        await job.join_one(model(0), replica="gen")
        async with weightsync.Observer(job.address, timeout=SECONDS) as observer:
            for wrong in (["a", "a"], [""], ["x" * 257], "gen", [1]):
                for party in (trainer, observer):
                    with pytest.raises(weightsync.PlanError):
                        await party.propose(wrong)  # type: ignore[arg-type] # on purpose
            members = await observer.membership()

    assert (None, ("gen",)) == (members.proposal, members.active)


async def test_trainer_ranks_that_differ_in_admit_are_refused() -> None:
    async with weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=2) as leader:
        other = weightsync.Trainer(
            leader.address, rank=1, world_size=2, admit="proposed", timeout=SECONDS
        )
        with pytest.raises(weightsync.PlanError, match="admit='proposed'"):
            async with other:
                pass
    with pytest.raises(weightsync.PlanError, match="admit is 'all' or 'proposed'"):
        weightsync.Trainer("tcp://127.0.0.1:0", admit="some")  # type: ignore[arg-type] # on purpose


async def test_a_proposal_to_trainers_that_are_gone_raises() -> None:
    async with open_job() as job:
        observer = await job.enter(weightsync.Observer(job.address, timeout=SECONDS))
        await job.trainers[0].aclose()
        with pytest.raises(weightsync.WeightSyncError, match="closed"):
            await observer.propose(None, timeout=SECONDS)


def test_the_blocking_ones_propose_too(processes: Processes, address: str) -> None:
    with weightsync.blocking.Trainer(
        address, rank=0, world_size=1, admit="proposed"
    ) as trainer:
        child = processes.start(driven.generator, address, "gen", 0, 1, N)
        assert "open" == child.hear()
        with weightsync.blocking.Observer(address, timeout=SECONDS) as observer:
            number = observer.propose(["gen"]).number
            trainer.wait_for_replicas(1, timeout=SECONDS)
            proposal = trainer.membership().proposal
            members = trainer.propose(None)
        with suppress(weightsync.WeightSyncError):
            driven.close(child)

    assert 2 <= number
    assert weightsync.Proposal(1, ("gen",)) == proposal
    assert (None, ("gen",)) == (members.proposal, members.active)
