"""What must be true of a simulated job, as its parties see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.pool import SUSPECT_SECONDS

if TYPE_CHECKING:
    from tests.pure.pool_replicas import Rank, Replica
    from tests.pure.pool_world import World
    from weightsync.messages import PushEnded


def check_always(world: World) -> None:
    """Hold at every step."""
    for replica in world.replicas:
        _check_commits(replica)
    _check_pool_commits(world)
    for push, outcomes in _outcomes(world).items():
        first = outcomes[0]
        assert all(other == first for other in outcomes), f"outcomes of push {push}"
    events = max((trainer.events for trainer in world.trainers), key=len)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    for trainer in world.trainers:
        length = len(trainer.events)
        at = trainer.events[0].number - 1 if trainer.events else 0
        assert trainer.events == events[at : at + length]


def _check_commits(replica: Replica) -> None:
    sequences = sorted((rank.commits for rank in replica.ranks), key=len)
    longest = sequences[-1]
    for commits in sequences:
        assert commits == longest[: len(commits)], "ranks commit different versions"
    versions = [version for version, _ in longest]
    assert versions == sorted(set(versions)), "versions do not increase"


def _check_pool_commits(world: World) -> None:
    """Those in the pool hold the same bytes under the same number."""
    pushes: dict[int, int] = {}
    for link in world.leader.members.replicas:
        for rank in world.linked[link].ranks:
            for version, push in rank.commits:
                assert pushes.setdefault(version, push) == push


def _outcomes(world: World) -> dict[int, list[PushEnded]]:
    found: dict[int, list[PushEnded]] = {}
    for trainer in world.trainers:
        for push, ended in trainer.heard.items():
            found.setdefault(push, []).append(ended)
    return found


def check_progress(world: World) -> None:
    """After all has happened: nobody waits who has all that it needs."""
    if any(trainer.disturbed or trainer.error for trainer in world.trainers):
        return
    calls = [trainer.calls[-1] if trainer.calls else None for trainer in world.trainers]
    call = calls[0]
    if call is None or any(c is None or c.over or c.cancelled for c in calls):
        return
    numbers = {c.number for c in calls if c is not None}
    if len(numbers) != 1 or call.asked.terms.on_busy == "skip":
        return
    for link in world.joined.get(call.number, set()):
        replica = world.linked[link]
        if not replica.disturbed and not _is_reported(world, call.number, link):
            waits = [_waits(rank, call.number) for rank in replica.ranks]
            assert not all(waits), f"{replica.label} waits for a push that is under way"


def _is_reported(world: World, push: int, link: int) -> bool:
    """Whether a transfer of a push is over, which may wait for those to others."""
    round_ = world.leader.pushes._rounds.get(push)
    transfer = None if round_ is None else round_.transfers.get(link)
    return transfer is not None and transfer.report is not None


def check_timers(world: World) -> None:
    """After all has happened: nothing is timed that is over."""
    members = world.leader.members
    late = any(wire.held for wire in world.wires)
    stopped = any(process.frozen for process in world.processes)
    forming = any(not replica.active for replica in members.replicas.values())
    calls = any(trainer.call or trainer.error for trainer in world.trainers)
    if late or stopped or forming or calls or not world.trainers[0].runs:
        return
    latest = world.clock.now + SUSPECT_SECONDS
    assert all(timer.due <= latest for timer in world.clock.pending)


def _waits(rank: Rank, push: int) -> bool:
    return rank.exposed is not None and push not in [p for _, p in rank.commits]


def check_reports(world: World) -> None:
    """After all has happened: what was reported is what is."""
    for push, outcomes in _outcomes(world).items():
        report = outcomes[0].report
        if report is None:
            if not world.leader.members.error:
                _check_nobody_has(world, push)
            continue
        for link in world.joined[push]:
            replica = world.linked[link]
            has = [push in [p for _, p in r.commits] for r in replica.ranks if r.runs]
            found = report.replicas[replica.name]
            if found.status == "delivered":
                assert all(has) or replica.disturbed
            elif not found.removed:
                assert not any(has), f"{replica.label} has push {push}"


def _check_nobody_has(world: World, push: int) -> None:
    for rank in world.ranks:
        assert push not in [pushed for _, pushed in rank.commits]


def check_end(world: World) -> None:
    """After all has happened, and whoever was stuck is gone: nothing is left over."""
    members = world.leader.members
    healthy = [replica for replica in world.replicas if replica.healthy]
    if not world.trainers[0].runs:
        assert not healthy
        assert all(trainer.error or not trainer.runs for trainer in world.trainers)
        return
    assert all(trainer.call is None for trainer in world.trainers if trainer.runs)
    if members.error is not None:
        assert not healthy
        assert not members.replicas
        ends = [e for e in members.log if e.role == "trainer" and e.kind != "joined"]
        if ends[0].kind == "failed":
            assert all(t.error for t in world.trainers if t.runs)
        return
    assert {replica.name for replica in healthy} == {
        replica.name for replica in members.active
    }
    names = tuple(replica.name for replica in members.active)
    assert all(trainer.pool == names for trainer in world.trainers)
    assert world.leader.kept == {
        "rounds": 0,
        "links": len(healthy),
        "trainers": len(world.trainers),
        "timers": 0,
    }
