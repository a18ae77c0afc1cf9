"""How a job ends: a trainer rank dies or sleeps for too long, or all of them close."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.scenario import PUSH_SECONDS
from tests.chaos.words import CLOSE_SECONDS, GRACE, OPEN_SECONDS, ChaosError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.cast import Job, Process
    from tests.chaos.stage import Stage

NOBODY = -1
"""The victim of a job that ends without one."""


def end_job(stage: Stage, victim: int, strike: Callable[[Process], None]) -> None:
    """All end that were in the job, in time, and know whose fault it was."""
    job = stage.job
    if job is None:
        return
    members = _members_of(stage, job)
    job.disturb()
    job.victim = victim
    strike(job.ranks[victim])
    survivors = [r for r in job.ranks if r.alive and r is not job.ranks[victim]]
    _end_pushes(stage, job, survivors)
    who = f"trainer rank {victim}"
    for rank, calls in members.items():
        _must_end(stage, rank, calls, "PeerError", who)
    for rank in survivors:
        _must_name(rank, who)
        rank.end("close")
        stage.must(lambda r=rank: r.over, CLOSE_SECONDS + GRACE, f"close {rank}")


def close_job(stage: Stage) -> None:
    """All trainer ranks close, after a push that is under way; nothing is a fault."""
    job = stage.job
    if job is None:
        return
    members = _members_of(stage, job)
    job.victim = NOBODY
    for rank in job.ranks:
        rank.end("close")
    limit = PUSH_SECONDS + CLOSE_SECONDS + 2 * GRACE
    limit += sum(rank.frozen_seconds for rank in job.ranks)
    for rank in job.ranks:
        stage.must(lambda r=rank: r.over, limit, f"close {rank}")
    stage.must(lambda: job.pushing is None, GRACE, "end the last push of a job")
    for rank, calls in members.items():
        _must_end(stage, rank, calls, "ClosedError", "")


def retire(stage: Stage) -> None:
    """A trainer rank that was frozen too long goes on, is told so, and closes."""
    job = stage.jobs[-1]
    if job.victim is None:
        return
    victim = job.ranks[job.victim]
    limit = PUSH_SECONDS + 2 * GRACE
    stage.must(lambda: victim.frozen_until is None, limit, f"let {victim} go on")
    stage.must(lambda: job.pushing is None, limit, f"end the push of {victim}")
    if len(job.ranks) > 1:
        push = stage.begin_push(job)
        stage.must(lambda: push.over, limit, f"end the last push of {victim}")
        _must_name(victim, "removed this process")
    victim.end("close")
    stage.must(lambda: victim.over, CLOSE_SECONDS + GRACE, f"close {victim}")


def _members_of(stage: Stage, job: Job) -> dict[Process, int]:
    """Wait for all trainer ranks; return the ranks of the pool, which lose them now.

    With each comes how many of its calls have ended.
    """
    stage.must(lambda: job.opened, OPEN_SECONDS + GRACE, "open all trainer ranks")
    members = stage.members(job)
    for replica in stage.replicas:
        replica.marks.add("orphaned")
        replica.returns = replica in members and replica.stays
    ranks = [rank for replica in members for rank in replica.processes]
    return {rank: len(rank.calls) for rank in ranks}


def _end_pushes(stage: Stage, job: Job, survivors: list[Process]) -> None:
    """A push that was over before the death is followed by one that is not."""
    limit = PUSH_SECONDS + 2 * GRACE + sum(rank.frozen_seconds for rank in survivors)
    what = "end the push of a killed trainer rank"
    stage.must(lambda: job.pushing is None, limit, what)
    who = f"trainer rank {job.victim}"
    calls = [rank.call("push") for rank in survivors]
    if any(call is None or who not in call.text for call in calls):
        push = stage.begin_push(job)
        stage.must(lambda: push.over, limit, what)


def _must_end(stage: Stage, rank: Process, since: int, kind: str, who: str) -> None:
    """A rank of the pool is told, in time, whose fault it is that the job ends."""
    limit = stage.lease + 2 * GRACE
    what = f"let {rank} know that the job ended: {kind} {who}"
    stage.must(lambda: rank.closed or rank.lost(kind, who, since), limit, what)
    if not rank.lost(kind, who, since):
        raise ChaosError(f"{rank} does not name {who or kind}: {rank.call('receive')}")


def _must_name(rank: Process, who: str) -> None:
    call = rank.call("push")
    if call is None or call.kind != "PeerError" or who not in call.text:
        raise ChaosError(f"{rank} does not name {who}: {call}")
