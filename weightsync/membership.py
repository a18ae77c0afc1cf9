"""Who is in a job, who came and went, and the messages that tell it: plain values."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from weightsync.stats import Status

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

REASON_LIMIT: Final = 4096
"""Characters of a reason; it is remembered and goes to everybody."""

REMEMBERED_EVENTS: Final = 1024
"""So many events are remembered, by the leader and by whoever follows it."""

Role = Literal["trainer", "replica"]
State = Literal["waiting", "joining", "active"]
Kind = Literal[
    "waiting", "joined", "left", "failed", "fenced", "unready", "quarantined"
]


class LastPush(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the last push did to a replica, and how many seconds ago it ended there.

    ``epoch`` is that of the count of its version.
    """

    version: int
    status: Status
    reason: str
    ago: float
    epoch: int = 0


class TrainerMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer rank; all times in seconds.

    ``silent`` since its last sign of life, ``age`` since it joined. Rank 0 is the
    leader itself and has no ``lease``. ``quarantined`` counts the links that NCCL did
    not end there, on GPUs only.
    """

    rank: int
    lease: float | None
    silent: float
    age: float
    quarantined: int = 0


class ReplicaMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica with this many ``ranks``; all times in seconds.

    ``waiting`` until it is proposed, where only proposed replicas are admitted;
    ``joining`` until its link is formed, then ``active``: pushes go to it. ``version``
    is the last that is whole on all of its ranks; None before the first. ``epoch`` is
    that of its count. ``lease`` and ``silent`` (since its last sign of life) are of its
    ``silent_rank``: rank 0, which watches over the others, or another one of which
    nothing has come for longer, and for more than half of its lease. ``age`` counts
    from when it joined.
    """

    name: str
    ranks: int
    mode: Literal["staged", "swap", "inplace"]
    state: State
    version: int | None
    push: LastPush | None
    lease: float | None
    silent: float
    age: float
    epoch: int = 0
    silent_rank: int = 0


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names that make up the pool; ``number`` counts the proposals of the job.

    It is 0 where only proposed replicas are admitted and none was proposed yet.
    """

    number: int
    names: tuple[str, ...]


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is in the job at one moment, as the leader (trainer rank 0) knows it.

    ``trainers`` are those of ``world_size`` ranks that have joined; ``version`` is the
    last that any replica was delivered, or held when it joined, and ``epoch`` that of
    its count; ``number`` is that of the last event before. ``term`` counts the leaders
    that the job has had in this store. ``proposal`` is the one in force, None where
    every replica is admitted.
    """

    number: int
    world_size: int
    version: int | None
    trainers: tuple[TrainerMember, ...]
    replicas: dict[str, ReplicaMember]
    epoch: int = 0
    term: int = 0
    proposal: Proposal | None = None

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the replicas that the next push goes to."""
        found = self.replicas.values()
        return tuple(replica.name for replica in found if replica.state == "active")

    @property
    def absent(self) -> tuple[str, ...]:
        """Who is known not to be in yet, in words: trainer ranks, and then replicas."""
        here = {trainer.rank for trainer in self.trainers}
        ranks = [rank for rank in range(self.world_size) if rank not in here]
        found = [f"trainer ranks {ranks} have not joined"] if ranks else []
        for state, what in (
            ("joining", "still joining"),
            ("waiting", "waiting to be proposed"),
        ):
            names = [one.name for one in self.replicas.values() if one.state == state]
            found += [f"{what}: {', '.join(names)}"] if names else []
        return tuple(found)


class MembershipEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change: who joined, left, failed or was fenced, for which reason.

    A replica that is ``waiting`` has to be proposed before it joins. One that is
    ``unready`` is in the pool and stays without version until the next push, because
    the version that is kept does not fit it. ``quarantined`` says that a trainer rank
    could not end its link to a replica that is out. ``number`` counts all events of the
    job from 1; ``time`` is that of the leader's clock, in seconds since 1970. ``name``
    is that of a replica, or the number of a trainer rank.
    """

    number: int
    time: float
    kind: Kind
    role: Role
    name: str
    reason: str = ""

    def __str__(self) -> str:
        """Write it for people."""
        trainer = self.role == "trainer"
        who = f"trainer rank {self.name}" if trainer else f"replica {self.name!r}"
        return f"{who} {self.kind}" + (f": {self.reason}" if self.reason else "")


class Happened(
    msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, dict=True
):
    """Leader to trainer ranks and observers: events, in order."""

    events: tuple[MembershipEvent, ...]


class AskMembership(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A trainer rank or an observer to the leader: who is there?"""

    number: int


class TellMembership(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to the question with this number."""

    number: int
    membership: Membership


class EventLog:
    """The events of a job in order; the oldest are forgotten."""

    def __init__(self) -> None:
        self._events: deque[MembershipEvent] = deque(maxlen=REMEMBERED_EVENTS)

    def __iter__(self) -> Iterator[MembershipEvent]:
        """Iterate over those that are remembered."""
        return iter(self._events)

    @property
    def number(self) -> int:
        """The number of the last; 0 where there is none."""
        return self._events[-1].number if self._events else 0

    def extend(self, events: Iterable[MembershipEvent]) -> None:
        """Append events that have numbers already."""
        self._events.extend(events)

    def add(self, kind: Kind, role: Role, name: str, reason: str) -> MembershipEvent:
        """Append an event under the next number; return it."""
        short = reason[:REASON_LIMIT]
        number = self.number + 1
        event = MembershipEvent(number, time.time(), kind, role, name, short)
        self._events.append(event)
        return event

    def after(self, number: int) -> MembershipEvent | None:
        """Return the first remembered event with a higher number, if there is one."""
        if not self._events or number >= self.number:
            return None
        return self._events[max(number + 1 - self._events[0].number, 0)]

    def last_failure(self, present: Container[str]) -> MembershipEvent | None:
        """Return the last event of a replica that failed, unless it has come back."""
        back: set[str] = set()
        for event in reversed(self._events):
            if event.role == "replica" and event.kind == "failed":
                here = event.name in back or event.name in present
                return None if here else event
            if event.kind in {"joined", "waiting"}:
                back.add(event.name)
        return None
