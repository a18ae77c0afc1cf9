"""A simulated job: the real leader, its trainer ranks and replicas, and their fates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.pure.pool_network import Clock, Process, Wire, connect
from tests.pure.pool_replicas import Rank, Replica
from tests.pure.pool_trainers import Trainer
from weightsync.errors import PeerError, WeightSyncError
from weightsync.fencing import Fence
from weightsync.hellos import TrainerHello
from weightsync.leader import Leader
from weightsync.messages import (
    Ended,
    Expect,
    Fault,
    Leaving,
    Manifests,
    PushEnded,
    PushRequest,
)
from weightsync.transfers import STOP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.pool import Replica as Member

BLINK: Final = 0.001
"""What a comparison of times allows."""


class SimulatedLeader(Leader):
    """The real one on a simulated clock; conversations without tasks."""

    def __init__(self, world_size: int, clock: Clock) -> None:
        self._clock = clock
        tasks: Any = None
        hello = TrainerHello(0, world_size)
        super().__init__(hello, tasks, Fence("default", 0, None))

    def _after(self, seconds: float, act: Callable[[], None]) -> Any:
        return self._clock.after(seconds, act)

    def admit_trainer(self, rank: int, wire: Wire) -> None:
        peer: Any = wire
        self.members.trainer_joined(rank, self.members.world_size, peer)

        def lost(error: WeightSyncError, *, left: bool) -> None:
            self.members.trainer_lost(rank, error, clean=left)

        _hold(wire, partial(self._on_trainer, rank), lost)

    def admit_replica(self, hello: Any, held: Any, wire: Wire) -> Member:
        peer: Any = wire
        member = self.members.replica_joined(hello, held, peer)

        def lost(error: WeightSyncError, *, left: bool) -> None:
            reason = "it left" if left else str(error)
            self.members.drop(member, PeerError(reason), clean=left)

        _hold(wire, partial(self._on_replica, member), lost)
        return member

    @property
    def kept(self) -> dict[str, int]:
        """How much it remembers, of all that may be forgotten."""
        return {
            "rounds": len(self.pushes._rounds),
            "links": len(self.members.replicas),
            "trainers": len(self.members.trainers),
            "timers": len(self._clock.pending),
        }


def _hold(wire: Wire, handle: Callable[[Any], None], lost: Callable[..., None]) -> None:
    left: list[bool] = []

    def noting(message: Any) -> None:
        if isinstance(message, Leaving):
            left.append(True)
        handle(message)

    wire.handle = noting
    wire.ended = lambda error: lost(error, left=bool(left))


class World:
    """Everything there is, and what was told to whom."""

    def __init__(self, world_size: int) -> None:
        self.clock: Final = Clock()
        self.leader: Final = SimulatedLeader(world_size, self.clock)
        self.replicas: Final[list[Replica]] = []
        self.linked: Final[dict[int, Replica]] = {}
        self.trainers: Final = [
            Trainer(rank, self.clock, self.linked) for rank in range(world_size)
        ]
        self.due: Final[dict[tuple[int, int], float]] = {}
        """When a rank must have been told the outcome of a push."""
        self.joined: Final[dict[int, set[int]]] = {}
        """The links that were active when the last rank called a push."""
        for trainer in self.trainers:
            self._admit_trainer(trainer)

    @property
    def processes(self) -> list[Process]:
        return [*self.trainers, *self.ranks]

    @property
    def ranks(self) -> list[Rank]:
        return [rank for replica in self.replicas for rank in replica.ranks]

    @property
    def wires(self) -> list[Wire]:
        return [wire for process in self.processes for wire in process.wires]

    def _admit_trainer(self, trainer: Trainer) -> None:
        trainer.wire, theirs = connect(trainer, self.trainers[0])
        trainer.wire.handle = trainer.handle
        trainer.wire.ended = trainer.fail
        theirs.posted = partial(self._told_trainer, trainer)
        self.leader.admit_trainer(trainer.rank, theirs)
        handle = theirs.handle

        def noting(message: Any) -> None:
            if isinstance(message, PushRequest):
                self._asked(trainer.rank, message)
            handle(message)

        theirs.handle = noting

    def join(self, name: str, mode: str, size: int) -> Replica:
        label = f"{name}/{len(self.replicas)}"
        replica = Replica(label, name, mode, size)
        replica.trainers = len(self.trainers)
        self.replicas.append(replica)
        hub = replica.ranks[0]
        hub.start(lambda: replica.introduce(self.trainers[0], self._await_manifests))
        return replica

    def _await_manifests(self, replica: Replica, wire: Wire) -> None:
        wire.posted = partial(self._told_replica, replica)

        def handle(message: Manifests) -> None:
            links = self.leader.members._links + 1
            self.linked[links] = replica
            try:
                self.leader.admit_replica(replica.hub.hello, message, wire)
            except WeightSyncError as error:
                self.linked.pop(links, None)
                wire.post(Ended(Fault.of(error)))
                wire.finish()

        wire.handle = handle

    # What the leader does

    def _asked(self, rank: int, request: PushRequest) -> None:
        due = self.clock.now + request.timeout + STOP_SECONDS + BLINK
        self.due[rank, request.push] = due
        asked = {r for r, push in self.due if push == request.push}
        if len(asked) == len(self.trainers):
            active = self.leader.members.active
            self.joined[request.push] = {member.link for member in active}

    def _told_trainer(self, trainer: Trainer, message: object) -> None:
        if isinstance(message, PushEnded):
            assert (trainer.rank, message.push) in self.due
            self.due[trainer.rank, message.push] = float("inf")
            self._check_outcome(message)

    def _told_replica(self, replica: Replica, message: object) -> None:
        if not isinstance(message, Expect):
            return
        assert message.sequence == replica.sequence + 1
        replica.sequence = message.sequence
        for rank in replica.ranks:
            if rank.alive and rank.error is None:
                assert rank.exposed is not None, "a put without credit"
                assert rank.arrival is None, "two transfers on one link"

    def _check_outcome(self, ended: PushEnded) -> None:
        """Whoever was never disturbed fails for reasons that are not its own."""
        if ended.report is None:
            return
        assert 0 <= ended.report.seconds < 60
        calls = [trainer.calls[ended.push - 1] for trainer in self.trainers]
        late = min(call.deadline for call in calls) - self.clock.now
        given_up = any(call.cancelled for call in calls) or late < 2.5 + BLINK
        busy = calls[0].asked.terms.on_busy == "skip"
        for link in self.joined[ended.push]:
            replica = self.linked[link]
            report = ended.report.replicas[replica.name]
            assert report.status != "skipped" or busy or replica.left
            if not replica.disturbed and not given_up:
                expected = {"delivered", "skipped"} if busy else {"delivered"}
                assert report.status in expected, report.reason

    # Time, and what happens in it

    def ready(self) -> list[Callable[[], object]]:
        """What may happen next, in any order."""
        found: list[Callable[[], object]] = [
            wire.deliver for wire in self.wires if wire.ready
        ]
        for process in self.processes:
            if process.runs:
                found += [partial(process.work, job) for job in process.jobs]
        return found

    def settle(self, *, local: bool = False) -> None:
        """Let everything happen that can, or what happens within processes."""
        moved = True
        while moved:
            moved = False
            for wire in self.wires:
                while wire.ready and (wire.local or not local):
                    wire.deliver()
                    moved = True
            for process in () if local else self.processes:
                for job in list(process.jobs) if process.runs else ():
                    moved = process.work(job) or moved

    def pass_time(self, seconds: float) -> None:
        """Let timers fire, in the order of time."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.settle(local=True)
            timer = self.clock.next(until)
            self.check_times()
            if timer is not None and self.trainers[0].runs:
                timer.act()
            self.settle(local=True)
        for trainer in self.trainers:
            trainer.look_at_clock()

    def check_times(self) -> None:
        """Pushes end in their time, whatever else happens."""
        if not self.trainers[0].runs:
            return
        for (rank, push), due in self.due.items():
            if rank in self.leader.members.trainers:
                assert self.clock.now <= due, f"push {push} does not end"
