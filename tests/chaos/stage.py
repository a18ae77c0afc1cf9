"""Carries a scenario out: starts and strikes processes, and lets trainers push."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from tests.chaos.cast import Job, Limits, Process, Push, Replica
from tests.chaos.downfall import close_job, end_job, retire
from tests.chaos.proposing import Scheduler
from tests.chaos.ranks import Place, generator, trainer
from tests.chaos.scenario import (
    FROZEN_PUSH_SECONDS,
    PUSH_SECONDS,
    CloseTrainers,
    Freeze,
    FreezeTrainer,
    Join,
    Kill,
    KillTrainer,
    Leave,
    Outlast,
    OutlastTrainer,
    Propose,
    Start,
)
from tests.chaos.words import CLOSE_SECONDS, GRACE, OPEN_SECONDS, ChaosError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.engines import Engine
    from tests.chaos.scenario import Action, Scenario, Step
    from tests.processes.harness import Processes

PAUSE = 0.02
LONG_PAUSE = 0.1
"""Between two pushes, and where nobody is in the pool: so that there are enough
versions, and not more than the bytes can tell apart."""


class Stage:
    """The processes of one scenario."""

    def __init__(
        self, scenario: Scenario, engine: Engine, processes: Processes, address: str
    ) -> None:
        self.replicas: list[Replica] = []
        self.jobs: list[Job] = []
        self._scenario = scenario
        self.engine = engine
        self._start_process = processes.start
        self._address = address
        self._began = time.monotonic()
        self._version = 0
        self._paused = False
        self._next_push = 0.0
        self.scheduler = Scheduler(self, at_work=scenario.proposed)

    @property
    def lease(self) -> float:
        """Seconds of every lease."""
        return self._scenario.lease

    # What all scenarios have in common

    def play(self) -> None:
        """Carry out every step at its moment."""
        for step in self._scenario.steps:
            self._await_moment(step)
            self.note(f"{step.moment}: {step.action}")
            self._act(step.action)
            self._paused = False
        self.must(lambda: not self._frozen, 10.0, "go on after having been stopped")

    def note(self, what: str) -> None:
        """Say what happens: pytest shows it where the test fails, however it does."""
        print(f"{time.monotonic() - self._began:7.3f} {what}")

    @property
    def job(self) -> Job | None:
        """The trainers that are at work."""
        last = self.jobs[-1] if self.jobs else None
        return None if last is None or last.victim is not None else last

    @property
    def everyone(self) -> list[Process]:
        """All processes so far."""
        found = [rank for job in self.jobs for rank in job.ranks]
        return found + [rank for replica in self.replicas for rank in replica.processes]

    # Time

    def pump(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Let things happen until a condition holds; False if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._turn(min(left, 0.01))
        return True

    def must(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """``pump``, but it is a failure if the condition does not hold in time."""
        if not self.pump(condition, seconds):
            raise ChaosError(f"did not {what} within {seconds:.1f} s")

    def _turn(self, seconds: float) -> None:
        for process in self._frozen:
            if time.monotonic() >= (process.frozen_until or 0.0):
                self.note(f"{process} goes on")
                process.thaw()
        self.scheduler.propose_if_due()
        self._push_if_due()
        listening = [process for process in self.everyone if not process.over]
        for process in wait(listening, seconds):
            self._take(process)

    def _take(self, process: Process) -> None:
        before = len(process.calls)
        process.take()
        for call in process.calls[before:]:
            if call.kind != "TimedOutError" or call.name != "receive":
                version = "" if call.version is None else f" {call.version}"
                found = call.report.replicas if call.report else ""
                self.note(
                    f"{process} {call.name}{version}: {call.kind} {call.text} {found}"
                )
            if call.name == "receive" and len(process.versions) == 1:
                process.count_once()

    @property
    def _frozen(self) -> list[Process]:
        return [p for p in self.everyone if p.alive and p.frozen_until is not None]

    def _await_moment(self, step: Step) -> None:
        job = self.job
        if job is not None and step.moment in {"between", "during"}:
            self.must(
                lambda: self._settled(job), OPEN_SECONDS + GRACE, "be in the pool"
            )
            self.finish_push()
            if step.moment == "during":
                self.begin_push(job, self._limits(step.action))
        elif step.moment == "forming":
            ranks = self.replicas[-1].processes
            self.must(lambda: any(r.doing for r in ranks), OPEN_SECONDS, "start")
        self.pump(lambda: False, step.delay)

    # Pushes

    def finish_push(self) -> None:
        """Return when no push is under way, and let none begin."""
        self._paused = True
        job = self.job
        if job is None:
            return
        limit = PUSH_SECONDS + 2 * GRACE + sum(r.frozen_seconds for r in job.ranks)
        self.must(lambda: job.pushing is None, limit, "end a push")

    def push(self, seconds: float) -> Push | None:
        """Push once; None without trainers that could."""
        job = self.job
        if job is None:
            return None
        self.finish_push()
        push = self.begin_push(job, Limits(seconds, seconds))
        self.must(lambda: push.over, seconds + 2 * GRACE, "end the last push")
        return push

    def _settled(self, job: Job) -> bool:
        """Whether everybody got a version whom nothing has happened to yet."""
        names = {replica.name for replica in self.members(job)}
        return job.opened and names >= {replica.name for replica in self.expected}

    @property
    def expected(self) -> list[Replica]:
        """Whom nothing has happened to and nobody keeps out: they are in the pool."""
        admits = self.scheduler.admits
        return [r for r in self.replicas if r.untouched and admits(r.name)]

    def _push_if_due(self) -> None:
        job = self.job
        if job is None or self._paused or not job.opened or job.pushing is not None:
            return
        if time.monotonic() >= self._next_push:
            self.begin_push(job)

    def _limits(self, action: Action | None = None) -> Limits:
        """Of a push, while some are frozen perhaps, or are about to be."""
        outlasting = isinstance(action, Outlast | OutlastTrainer)
        if outlasting or any(process.outlasting for process in self._frozen):
            return Limits(PUSH_SECONDS, self._scenario.lease)
        freezing = isinstance(action, Freeze) or self._frozen
        seconds = FROZEN_PUSH_SECONDS if freezing else PUSH_SECONDS
        return Limits(seconds, seconds)

    def begin_push(self, job: Job, limits: Limits | None = None) -> Push:
        self._version += 1
        seconds, limit = limits or self._limits()
        push = Push(self._version, job.ranks, seconds)
        frozen = any(rank.frozen_until is not None for rank in job.ranks)
        push.disturbed = frozen or job.victim is not None
        job.pushes.append(push)
        for rank in job.ranks:
            rank.say((push.version, seconds, limit))
        empty = self._version > 1 and not self.members(job)
        self._next_push = time.monotonic() + (LONG_PAUSE if empty else PAUSE)
        return push

    # Actions

    def _act(self, action: Action) -> None:  # noqa: C901 -- one case an action.
        match action:
            case Start(ranks):
                self._start(ranks)
            case Join():
                self._join(action)
            case Leave(number):
                self._leave(self.replicas[number])
            case Kill(number, rank):
                self._kill(self.replicas[number], rank)
            case Freeze(number, rank, seconds):
                self.replicas[number].marks.add("frozen")
                self.replicas[number].processes[rank].freeze(seconds)
            case Outlast(number, rank, seconds):
                self._outlast(self.replicas[number], rank, seconds)
            case Propose(names, rank, excluded):
                self.scheduler.decide(names, rank)
                self._exclude(excluded)
            case CloseTrainers():
                close_job(self)
            case KillTrainer(rank):
                end_job(self, rank, Process.kill)
            case FreezeTrainer(rank, seconds):
                self._freeze_trainer(rank, seconds)
            case OutlastTrainer(rank, seconds):
                end_job(self, rank, lambda p: p.freeze(seconds, outlasting=True))
                retire(self)

    def _place(self, rank: int, world: int) -> Place:
        device, scenario = self.engine.device, self._scenario
        where = self._address, rank, world
        how = scenario.lease, self._replays, scenario.proposed
        return Place(*where, scenario.rows, device, *how)

    @property
    def _replays(self) -> bool:
        """Whether trainers keep versions, which is memory of the host only."""
        return self._scenario.replay and self.engine.device == "cpu"

    @property
    def kept_segments(self) -> int:
        """Segments of a trainer rank that keeps a version: a group of one, a window."""
        return 2 if self._replays else 0

    def _start(self, world: int) -> None:
        ranks = []
        for rank in range(world):
            name = f"trainer-{len(self.jobs)}-{rank}"
            child = self._start_process(trainer, self._place(rank, world), name=name)
            ranks.append(Process(child))
        self.jobs.append(Job(ranks))
        for replica in self.replicas:
            if replica.returns and replica.stays:
                replica.marks.discard("orphaned")

    def _join(self, join: Join) -> None:
        self._end_others(join.name)
        ranks = []
        for rank in range(join.ranks):
            place = self._place(rank, join.ranks)
            seconds = self._scenario.receive_seconds
            name = f"{join.name}#{join.replica}-{rank}"
            child = self._start_process(generator, place, join, seconds, name=name)
            ranks.append(Process(child))
        self.replicas.append(Replica(join, ranks))

    def _end_others(self, name: str) -> None:
        """Whoever starts a replica again has ended what still tried to join for it.

        That is also a rank 0 that waits for a rank which was killed before it came, and
        what tried when the trainers went, and has joined those that came after them.
        """
        self.scheduler.settle()
        trying = [
            rank
            for replica in self.replicas
            for rank in replica.processes
            if replica.name == name
            and rank.alive
            and (not rank.versions or "orphaned" in replica.marks or replica.join.stays)
        ]
        for rank in trying:
            rank.end("leave")
        limit = CLOSE_SECONDS + GRACE + sum(rank.frozen_seconds for rank in trying)
        for rank in trying:
            self.must(lambda r=rank: r.over, limit, f"end {rank}, which tries to open")

    def _kill(self, replica: Replica, rank: int) -> None:
        """Its other ranks have to notice if it is in the pool."""
        replica.breaks = self._is_in(replica)
        replica.marks.add("killed")
        replica.processes[rank].kill()

    def _outlast(self, replica: Replica, rank: int, seconds: float) -> None:
        replica.marks.add("outlasted")
        process = replica.processes[rank]
        # One that stays may be on its way to trainers of which it is no member yet.
        inside = self._is_in(replica) if replica.join.stays else replica.opened
        process.removed = inside and self._only_leases_end()
        process.freeze(seconds, outlasting=True)

    def _is_in(self, replica: Replica) -> bool:
        return self.job is not None and replica in self.members(self.job)

    def _only_leases_end(self) -> bool:
        """Whether nothing but the lease of a frozen replica ends: no push before."""
        job = self.job
        push = None if job is None else job.pushing
        short = push is not None and push.seconds <= self.lease
        return job is not None and not short

    def _exclude(self, number: int | None) -> None:
        """A proposal does not name a replica: if it is in the pool, it is removed."""
        if number is not None:
            replica, job = self.replicas[number], self.job
            member = job is not None and replica in self.members(job)
            replica.marks.add("excluded")
            for process in replica.processes:
                process.excluded = member

    def _leave(self, replica: Replica) -> None:
        replica.marks.add("left")
        for process in replica.processes:
            process.end("leave")

    def _freeze_trainer(self, rank: int, seconds: float) -> None:
        job = self.job
        if job is not None:
            job.disturb()
            job.ranks[rank].freeze(seconds)

    def members(self, job: Job) -> list[Replica]:
        """The untouched replicas that got the last version: they are in the pool."""
        reports = [c.report for push in job.pushes for c in push.calls.values()]
        report = next((r for r in reversed(reports) if r is not None), None)
        names = () if report is None else report.delivered
        return [
            r for r in self.replicas if r.untouched and r.received and r.name in names
        ]
