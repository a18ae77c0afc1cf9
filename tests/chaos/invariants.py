"""What must be true of every scenario, by all that its processes said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.words import GRACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.cast import Job, Process, Push, Replica
    from tests.chaos.stage import Stage


def faults(stage: Stage) -> list[str]:
    """Return everything that is wrong; nothing else decides."""
    found: list[str] = []
    for process in stage.everyone:
        found += _late(process)
    for replica in stage.replicas:
        for process in replica.processes:
            found += _contents(process, replica)
        found += _agreement(replica)
    for job in stage.jobs:
        for push in job.pushes:
            found += _same_outcome(push, job)
            found += _as_reported(push, stage.replicas)
        found += _nobody_is_lost(job, stage.replicas)
        found += _proposals(job)
    return found


def _late(process: Process) -> Iterator[str]:
    """Every call ends within its timeout and the grace, but for time it was stopped."""
    for call in process.calls:
        if call.seconds > call.limit + GRACE + process.frozen_seconds:
            yield f"{process}: {call.name} took too long: {call}"
        if call.name == "close" and call.kind != "ok":
            yield f"{process}: {call}"


def _contents(process: Process, replica: Replica) -> Iterator[str]:
    """A generator holds one whole version, whoever looks and whenever."""
    versions = process.versions
    if sorted(set(versions)) != versions:
        yield f"{process} received {versions}"
    for call in process.calls:
        if call.wrong:
            yield f"{process}: version {call.version} is not whole: {call.wrong}"
    for torn in process.torn:
        yield f"{process}: a reader saw {torn}"
    held = process.held
    if held is None:
        return
    if held.wrong or (held.unreadable and replica.join.mode != "inplace"):
        yield f"{process} holds {held}"
    # A receive that is cancelled while it switches has switched.
    last = versions[-1] if versions else None
    newer = (held.version or 0) > (last or 0) and process.told_to_end is not None
    if not held.unreadable and held.version not in {None, last} and not newer:
        yield f"{process} received {versions} and holds {held}"


def _agreement(replica: Replica) -> Iterator[str]:
    """The ranks of a replica received the same, one perhaps not yet all of it."""
    shorter, *rest = sorted([p.versions for p in replica.processes], key=len)
    for longer in rest:
        # Who is told to end in the middle may have read less than the others.
        through = replica.untouched or replica.marks == {"orphaned"}
        left = all(process.told_to_end is None for process in replica.processes)
        whole = through or (left and replica.marks == {"excluded"})
        if longer[: len(shorter)] != shorter or (whole and longer != shorter):
            yield f"ranks of {replica} received {shorter} and {longer}"


def _same_outcome(push: Push, job: Job) -> Iterator[str]:
    """All trainer ranks that are left return the same report, or raise the same."""
    outcomes = [
        call._replace(seconds=0.0)
        for rank, call in push.calls.items()
        if rank != job.victim
    ]
    if any(outcome != outcomes[0] for outcome in outcomes):
        yield f"push of {push.version} ended differently: {outcomes}"
    for outcome in outcomes[:1]:
        if outcome.kind not in {"ok", "PeerError", "TimedOutError"}:
            yield f"push of {push.version}: {outcome}"


def _as_reported(push: Push, replicas: list[Replica]) -> Iterator[str]:
    """Who is reported to have a version has it, and who is said not to has it not."""
    report = next((c.report for c in push.calls.values() if c.report), None)
    for name, said in report.replicas.items() if report else ():
        same = [replica for replica in replicas if replica.name == name]
        having = [replica for replica in same if _may_have(replica, push.version)]
        what = f"push of {push.version}: {name} is reported as {said}"
        if said.status == "delivered" and not having:
            yield f"{what} and does not have it"
        sure = [r for r in same if any(push.version in p.versions for p in r.processes)]
        if said.status != "delivered" and not said.removed and sure:
            yield f"{what} and has it"
        if len(same) == 1 and not push.disturbed:
            yield from _status(same[0], said.status, what)


def _may_have(replica: Replica, version: int) -> bool:
    """Whether all of its ranks have a version that were left to receive it."""
    return all(
        version in process.versions or process.killed or process.told_to_end is not None
        for process in replica.processes
        if process.opened or replica.untouched
    )


def _status(replica: Replica, status: str, what: str) -> Iterator[str]:
    """Only what happened to a replica itself can spoil a push to it."""
    if replica.untouched and status != "delivered":
        yield f"{what} though nothing happened to it"
    if replica.marks in ({"left"}, {"excluded"}) and status == "failed":
        yield f"{what} though it only {replica.marks}"


def _nobody_is_lost(job: Job, replicas: list[Replica]) -> Iterator[str]:
    """A replica that got a version and that nothing happened to gets all later ones."""
    for replica in replicas:
        names = [other for other in replicas if other.name == replica.name]
        if not replica.untouched or len(names) > 1:
            continue
        got = False
        for push in job.pushes:
            report = next((c.report for c in push.calls.values() if c.report), None)
            has = report is not None and replica.name in report.delivered
            if got and not has and not push.disturbed:
                yield f"push of {push.version} left {replica} out: {push.calls}"
            got = got or has


def _proposals(job: Job) -> Iterator[str]:
    """Trainers that nothing happened to accept every proposal."""
    for rank in job.ranks if job.victim is None else ():
        for call in rank.calls:
            if call.name == "propose" and call.kind != "ok":
                yield f"{rank}: {call}"
