"""A simulated job: the real leader, everybody around it, and their failures."""

from __future__ import annotations

import gc
import sys
from functools import partial
from statistics import median
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from weightsync.bench.patterns import VerificationError
from weightsync.bench.pool_network import DELAY, Clock, Line, Loop
from weightsync.bench.pool_parties import (
    FORM,
    PLAN_GENERATOR,
    Replica,
    Sizes,
    Trainer,
)
from weightsync.channel import Endpoint
from weightsync.errors import PeerError
from weightsync.fencing import Fence
from weightsync.hellos import TrainerHello
from weightsync.leader import Incoming, Leader
from weightsync.peer import Sign
from weightsync.store import Rendezvous

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LEASE: Final = 10.0
"""Seconds until a replica that is frozen is dropped."""

RESTART: Final = 30.0
"""Seconds until a replica that failed is back."""

SKEW: Final = 0.01
"""Seconds between the first and the last trainer rank that calls push."""

TIMEOUT: Final = 60.0
LONGEST: Final = 3600.0


Beside = Literal["nothing", "died", "frozen", "joined"]


_DISTURBANCES: Final[tuple[Beside, ...]] = ("frozen", "died", "joined")
"""What delays a push most comes first."""


class Span(NamedTuple):
    """From when to when something went on."""

    begin: float
    end: float
    what: Beside = "nothing"


class Pushed(NamedTuple):
    """What one push took, and what a replica did meanwhile."""

    seconds: float
    cpu: float
    messages: int
    hub_messages: int
    hub_cpu: float
    beside: Beside


class Store:
    """Counts the calls of a store."""

    def __init__(self) -> None:
        self.calls = 0
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.calls += 1
        self._values[key] = value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Return what is there; nothing here is claimed."""
        del desired
        self.calls += 1
        return self._values.get(key, expected)


class SimulatedLeader(Leader):
    """The real one, with a simulated loop under it."""

    def __init__(self, world_size: int, loop: Loop) -> None:
        self._loop = loop
        tasks: Any = None
        hello = TrainerHello(0, world_size)
        super().__init__(hello, tasks, Fence("default", 0, None))

    def _after(self, seconds: float, act: Callable[[], None]) -> Any:
        return self._loop.after(seconds, act)

    def admit_trainer(self, rank: int, line: Line) -> None:
        """Take a trainer rank in."""
        peer: Any = line
        line.handle = partial(self._on_trainer, rank)
        self.members.trainer_joined(rank, self.members.world_size, peer)

    def admit_replica(self, replica: Replica, line: Line) -> None:
        """Take a replica in."""
        peer: Any = line
        hub = replica.hub
        member = self.members.replica_joined(hub.hello, hub.held, peer)
        replica.linked(member.link)
        line.handle = partial(self._on_replica, member)
        line.ended = lambda error: self.members.drop(member, PeerError(str(error)))


class Job:
    """Trainer ranks, replicas, and a leader whose work is measured."""

    def __init__(self, sizes: Sizes, chance: random.Random) -> None:
        self.clock: Final = Clock()
        self.store: Final = Store()
        self.failures: list[Span] = []
        """Until the leader has noticed."""
        self.joins: list[Span] = []
        """Until all have planned."""
        self.store_of_a_join = 0
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Incoming | Sign)
        self.leader_loop: Final = Loop(self.clock, decoder)
        self.leader: Final = SimulatedLeader(sizes.trainers, self.leader_loop)
        self._sizes: Final = sizes
        self._chance: Final = chance
        self._linked: dict[int, Replica] = {}
        self._replicas: dict[str, Replica] = {}
        self._rate = 0.0
        self._pushes = 0
        any_store: Any = self.store
        self._rendezvous = Rendezvous(any_store, "weightsync/default")
        self._trainers = [
            Trainer(rank, self.clock, self._linked) for rank in range(sizes.trainers)
        ]

    # Joining

    def start(self) -> None:
        """Let everybody join at once; return when every replica is active."""
        self._publish("leader")
        for trainer in self._trainers:
            if trainer.rank > 0:
                self._look_up("leader")
            trainer.line = Line(
                self.leader_loop, f"trainer {trainer.rank}", trainer.hear
            )
            admit = partial(self.leader.admit_trainer, trainer.rank, trainer.line)
            self.leader_loop.call(admit)
        for number in range(self._sizes.replicas):
            self._join(f"gen-{number}")
        self._await_replicas()

    def _publish(self, key: str) -> None:
        self._rendezvous.publish(key, Endpoint("10.0.0.1", 29400, "0" * 32))

    def _look_up(self, key: str) -> None:
        self._rendezvous.lookup(key, Endpoint, timeout=1.0)

    def _join(self, name: str) -> None:
        calls = self.store.calls
        self._publish(f"replica/{name}")
        for _ in range(1, self._sizes.ranks):
            self._look_up(f"replica/{name}")
        self._look_up("leader")
        self.store_of_a_join = self.store.calls - calls
        planned = self.clock.now + FORM + PLAN_GENERATOR
        self.joins.append(Span(self.clock.now, planned, "joined"))
        self._replicas[name] = replica = Replica(name, self.clock, self._sizes)
        line = Line(self.leader_loop, f"replica {name!r}", replica.hear)

        def deliver(messages: list[Any], frames: list[Any]) -> None:
            del messages
            if replica.runs:
                line.arrive(frames)

        def admit(message: object) -> None:
            del message  # its manifests
            self.leader.admit_replica(replica, line)
            self._linked[replica.link] = replica

        line.handle = admit
        replica.connect(deliver)
        replica.leader = line

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        limit = self.clock.now + LONGEST
        while not condition():
            if self.clock.now > limit or not self.clock.step():
                raise VerificationError(f"{what} after {self.clock.now:.0f} s")

    def _await_replicas(self) -> None:
        members, count = self.leader.members, self._sizes.replicas
        self._await(lambda: len(members.active) == count, "not all replicas are active")
        self.clock.run(self.clock.now + 5.0)

    # Pushing

    def push(self, every: float) -> Pushed:
        """Push once; the next may begin ``every`` seconds after this one did."""
        self._pushes += 1
        number, began = self._pushes, self.clock.now
        before, hubs = self._counts(), self._hub_counts()
        for trainer in self._trainers:
            when = began + self._chance.uniform(0.0, SKEW)
            call = partial(trainer.push, number, TIMEOUT, first=number == 1)
            self.clock.at(when, call)
        last = self._trainers[-1]
        self._await(lambda: number in last.ended, f"push {number} has not ended")
        self.clock.run(self.clock.now + 0.5)
        ended = self._outcome(number)
        busy, messages = (a - b for a, b in zip(self._counts(), before, strict=True))
        told = [
            tuple(a - b for a, b in zip(now, hubs[name], strict=True))
            for name, now in self._hub_counts().items()
            if name in hubs
        ]
        self.clock.run(max(began + every, self.clock.now))
        return Pushed(
            ended - began,
            busy,
            round(messages),
            round(median([count for _, count in told])),
            median([cpu for cpu, _ in told]),
            self._beside(Span(began, ended)),
        )

    def _beside(self, push: Span) -> Beside:
        found = {
            span.what
            for span in self.failures + self.joins
            if span.begin < push.end and push.begin < span.end
        }
        for what in _DISTURBANCES:
            if what in found:
                return what
        return "nothing"

    def _outcome(self, number: int) -> float:
        """Return when the last rank had the outcome, which must be the same for all."""
        last = 0.0
        first = self._trainers[0].ended.get(number)
        for trainer in self._trainers:
            found = trainer.ended.get(number)
            if found is None or first is None or found[1] is not first[1]:
                raise VerificationError(
                    f"push {number} did not end on rank {trainer.rank} as on rank 0"
                )
            last = max(last, found[0])
        return last

    def _counts(self) -> tuple[float, float]:
        loop = self.leader_loop
        return loop.busy, float(loop.received + loop.sent)

    def _hub_counts(self) -> dict[int, tuple[float, float]]:
        return {
            link: (each.loop.busy, float(each.loop.received + each.loop.sent))
            for link, each in self._linked.items()
            if each.runs
        }

    # Failing

    def let_fail(self, rate: float) -> None:
        """Let replicas fail from now on, so many in a second on average."""
        self._rate = rate
        if rate > 0:
            self._fail_next()

    def _fail_next(self) -> None:
        pause = self._chance.expovariate(self._rate)
        self.clock.at(self.clock.now + pause, self._fail)

    def _fail(self) -> None:
        if self._rate <= 0:
            return
        running = [replica for replica in self._replicas.values() if replica.runs]
        replica = self._chance.choice(running)
        what: Beside = "frozen" if len(self.failures) % 2 else "died"
        reason, silence = "closed the connection", DELAY
        if what == "died":
            replica.die()
        else:
            replica.freeze()
            reason = "gave no sign of life"
            silence = LEASE - self._chance.uniform(0.0, LEASE / 4)
        self.failures.append(Span(self.clock.now, self.clock.now + silence, what))
        line = replica.leader
        self._at(silence, line.close, f"{line.name} {reason}")
        self._at(RESTART, self._join, replica.name)
        self._fail_next()

    def _at(self, seconds: float, act: Callable[..., None], *what: Any) -> None:
        self.clock.at(self.clock.now + seconds, act, *what)

    # The end

    def finish(self) -> int:
        """Let all come back and push once more; return how much was compared."""
        self._rate = 0.0
        self.clock.run(self.clock.now + RESTART + LEASE)
        self._await_replicas()
        self.push(0.0)
        version = self.leader.pushes.last_version
        for replica in self._replicas.values():
            if replica.version != version:
                raise VerificationError(
                    f"replica {replica.name!r} has version {replica.version}, "
                    f"not {version}"
                )
        return self._pushes * self._sizes.trainers + self._sizes.replicas

    @property
    def kept(self) -> int:
        """Bytes of what the leader knows."""
        return size_of(self.leader.members, self.leader.pushes)


def size_of(*roots: object) -> int:
    """Bytes of objects and all that they lead to, without channels and code."""
    leave = (Line, Loop, type, FunctionType, MethodType, ModuleType)
    seen: dict[int, object] = {id(root): root for root in roots}
    todo = list(roots)
    while todo:
        for found in gc.get_referents(todo.pop()):
            if id(found) not in seen and not isinstance(found, leave):
                seen[id(found)] = found
                todo.append(found)
    return sum([sys.getsizeof(found) for found in seen.values()])
