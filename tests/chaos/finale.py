"""How every scenario ends: a last version for all who are left, and nothing remains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.words import CLOSE_SECONDS, GRACE, OPEN_SECONDS, ChaosError

if TYPE_CHECKING:
    from tests.chaos.cast import Job, Process, Push, Replica
    from tests.chaos.stage import Stage
    from tests.chaos.words import Census

LAST_SECONDS = 10.0
"""Timeout of the last push: nobody is frozen any more."""

TOLD = "removed this process, which gave no sign of life for"

NOT_NAMED = "does not name it"

SLACK = 3
"""Descriptors and threads that may be open for a moment."""


def finish(stage: Stage) -> None:
    """Push once more to all who are left, let all go, and look what stays."""
    job = stage.job
    if job is not None:
        stage.scheduler.settle()
        untouched = stage.expected
        _gather(stage, job, untouched)
        push = stage.push(LAST_SECONDS)
        if push is not None:
            _all_have(stage, push, untouched)
    _broken_ones_end(stage)
    _removed_ones_end(stage)
    _excluded_ones_end(stage)
    _let_go(stage)
    if job is not None:
        _trainers_are_as_before(stage, job)
        for rank in job.ranks:
            rank.end("close")
    limit = CLOSE_SECONDS + GRACE
    everyone = stage.everyone
    stage.must(lambda: all(p.over for p in everyone), limit, "end all processes")


def _gather(stage: Stage, job: Job, untouched: list[Replica]) -> None:
    """Wait until the pool has every replica that nothing happened to."""
    stage.must(lambda: job.opened, OPEN_SECONDS + GRACE, "open all trainer ranks")
    stage.finish_push()
    wanted = {replica.name for replica in untouched}

    def joined() -> bool:
        names = set(_ask_replicas(stage, job.ranks[0]))
        return wanted <= names and all(replica.opened for replica in untouched)

    stage.must(joined, OPEN_SECONDS, f"take {sorted(wanted)} into the pool")


def _ask_replicas(stage: Stage, rank: Process) -> tuple[str, ...]:
    before = len(rank.replicas)
    rank.say("replicas")
    stage.must(lambda: len(rank.replicas) > before, GRACE, "name the replicas")
    return rank.replicas[-1]


def _all_have(stage: Stage, push: Push, untouched: list[Replica]) -> None:
    """Who is reported to have the last version receives it, and nothing has grown."""
    call = push.calls[0]
    if untouched and call.kind != "ok":
        raise ChaosError(f"the last push failed: {call}")
    names = call.report.delivered if call.report else ()
    last = {replica.name: replica for replica in stage.replicas}
    having = [last[name] for name in names if last[name].marks <= {"frozen"}]
    for process in (rank for replica in having for rank in replica.processes):
        stage.must(
            lambda p=process: p.versions[-1:] == [push.version],
            GRACE,
            f"let {process} have version {push.version}",
        )
        first = _count(stage, process, 0)
        process.say("census")
        _must_be_flat(stage, process, first, _count(stage, process, 1))


def _count(stage: Stage, process: Process, index: int) -> Census:
    stage.must(lambda: len(process.census) > index, GRACE, f"count what {process} has")
    return process.census[index]


def _must_be_flat(stage: Stage, process: Process, first: Census, last: Census) -> None:
    # One that stays maps memory of each trainer rank, and may now have more of them.
    ranks = [len(job.ranks) for job in stage.jobs]
    more = (ranks[-1] - min(ranks)) * (1 + stage.engine.segments)
    grown = (
        last.descriptors > first.descriptors + SLACK
        or last.threads > first.threads + SLACK
        or last.segments > first.segments + more
    )
    if grown:
        raise ChaosError(f"{process} had {first} and has {last}")


def _ended(process: Process) -> bool:
    """Whether it is through, or was told that it is out of the pool."""
    return process.closed or process.lost("PeerError", "")


def _broken_ones_end(stage: Stage) -> None:
    """Who has joined and lost a rank of its replica ends by itself, and says so."""
    for replica in stage.replicas:
        notice = replica.breaks if replica.join.stays else replica.opened
        if replica.marks == {"killed"} and notice:
            for process in replica.processes:
                if process.alive:
                    what = f"let {process} end without its other rank"
                    stage.must(lambda p=process: _ended(p), 2 * GRACE, what)


def _removed_ones_end(stage: Stage) -> None:
    """Who was frozen for longer than its lease ends by itself, and knows why."""
    for replica in stage.replicas:
        removed = [p for p in replica.processes if p.removed and not p.told_to_end]
        if replica.marks != {"outlasted"} or not removed:
            continue
        for process in replica.processes:
            what = f"let {process} end as removed"
            stage.must(lambda p=process: _ended(p), 2 * GRACE, what)
        call = removed[0].call("receive")
        if not removed[0].lost("PeerError", TOLD):
            raise ChaosError(f"{removed[0]} does not know that it was removed: {call}")


def _excluded_ones_end(stage: Stage) -> None:
    """Who was in the pool, and is not proposed any more, ends and knows why."""
    for replica in stage.replicas:
        excluded = [p for p in replica.processes if p.excluded and not p.told_to_end]
        for process in excluded if replica.marks == {"excluded"} else ():
            what = f"let {process} end, which is not proposed"
            stage.must(lambda p=process: _ended(p), 2 * GRACE, what)
            call = process.call("receive")
            if not process.lost("PeerError", NOT_NAMED):
                raise ChaosError(f"{process} does not know why it ended: {call}")


def _let_go(stage: Stage) -> None:
    everyone = [p for replica in stage.replicas for p in replica.processes]
    for process in everyone:
        process.end("leave")
    limit = CLOSE_SECONDS + GRACE
    stage.must(lambda: all(p.over for p in everyone), limit, "close the generators")


def _trainers_are_as_before(stage: Stage, job: Job) -> None:
    """Without replicas trainer ranks have no more open than when they had opened.

    But for the version that they keep.
    """
    for rank in job.ranks:
        what = f"let {rank} forget the replicas"
        stage.must(lambda r=rank: not _ask_replicas(stage, r), GRACE, what)

        def flat(rank: Process = rank) -> bool:
            index = len(rank.census)
            rank.say("census")
            last, first = _count(stage, rank, index), rank.census[0]
            return (
                last.segments <= stage.kept_segments + stage.engine.segments
                and last.descriptors <= first.descriptors + SLACK
                and last.threads <= first.threads + SLACK
            )

        if not stage.pump(flat, GRACE):
            raise ChaosError(f"{rank} had {rank.census[0]} and has {rank.census[-1]}")
    _keys_are_few(stage, job)


def _keys_are_few(stage: Stage, job: Job) -> None:
    """The store has leader and term, and a hub for each name: nothing that grows."""
    names = {replica.name for replica in stage.replicas}
    allowed = {f"replica/{name}" for name in names} | {"leader", "term"}
    prefix = "weightsync/default/"
    ours = [key for key in job.ranks[0].census[-1].keys if prefix in key]
    found = {key.partition(prefix)[2] for key in ours}
    if not found <= allowed or len(ours) > len(found):
        raise ChaosError(f"keys of the store: {job.ranks[0].census[-1].keys}")
