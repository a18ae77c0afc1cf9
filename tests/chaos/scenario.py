"""Random scenarios: what happens to whom and when, drawn from a seed. Plain data."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["staged", "swap", "inplace"]
Moment = Literal["now", "between", "during", "forming"]
Store = Literal["tcp", "file"]

MODES: tuple[Mode, ...] = ("staged", "swap", "inplace")

MAX_REPLICAS = 4
PUSH_SECONDS = 8.0
"""Timeout of a push: nothing but a frozen process makes one last."""

FROZEN_PUSH_SECONDS = 1.0
"""Timeout of a push while somebody is frozen: it may last so long."""

LEASES = (1.0, 1.5, 2.0)
"""Shorter than the timeout of a push, and than some freezes."""

PROPOSED = 3
"""With each so many-th seed somebody decides who is in the pool."""


@dataclass(frozen=True, slots=True)
class Start:
    """Trainers start: the first ones, or new ones after all have gone."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Join:
    """A replica starts; ``replica`` is its number in the scenario.

    One that ``stays`` joins again whenever it is out of the pool.
    """

    replica: int
    name: str
    ranks: int
    mode: Mode
    stays: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """All ranks of a replica close."""

    replica: int


@dataclass(frozen=True, slots=True)
class Kill:
    """One rank of a replica is killed."""

    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """One rank of a replica is stopped and goes on some seconds later."""

    replica: int
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """A trainer rank is killed, which ends the job."""

    rank: int


@dataclass(frozen=True, slots=True)
class FreezeTrainer:
    """A trainer rank is stopped and goes on some seconds later."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outlast:
    """One rank of a replica is stopped for longer than its lease, and then goes on."""

    replica: int
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OutlastTrainer:
    """A trainer rank is stopped for longer than its lease, which ends the job."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CloseTrainers:
    """All trainer ranks close, which ends the job."""


@dataclass(frozen=True, slots=True)
class Propose:
    """A trainer rank proposes who is in the pool; without one who is in it perhaps.

    ``names`` are all that may be in it, None stands for everybody; ``excluded`` is the
    number of the replica that is not named any more.
    """

    names: tuple[str, ...] | None
    rank: int
    excluded: int | None = None


Action = (
    Start
    | Join
    | Leave
    | Kill
    | Freeze
    | Outlast
    | KillTrainer
    | FreezeTrainer
    | OutlastTrainer
    | CloseTrainers
    | Propose
)


@dataclass(frozen=True, slots=True)
class Step:
    """An action and its moment; ``delay`` seconds pass after the moment began.

    "between": no push is under way. "during": one has begun. "forming": the replica
    that came last has begun to join.
    """

    action: Action
    moment: Moment
    delay: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run; ``rows`` is the size of the model."""

    seed: int
    store: Store
    rows: int
    lease: float
    receive_seconds: float
    steps: tuple[Step, ...]

    @property
    def replay(self) -> bool:
        """Whether trainers keep versions: with every other seed."""
        return self.seed % 2 == 1

    @property
    def proposed(self) -> bool:
        """Whether only proposed replicas are admitted: with every third seed."""
        return self.seed % PROPOSED == 0

    def __str__(self) -> str:
        """Write it down, a step a line."""
        lines = [
            f"{step.moment} +{step.delay:.3f} s: {step.action}" for step in self.steps
        ]
        head = (
            f"seed {self.seed}: store {self.store}, {self.rows} rows, lease "
            f"{self.lease} s, receive {self.receive_seconds} s"
            f"{', replay' if self.replay else ''}"
            f"{', proposed' if self.proposed else ''}"
        )
        return "\n  ".join([head, *lines])


def draw(seed: int, modes: tuple[Mode, ...] = MODES) -> Scenario:
    """Draw a scenario: the same one for the same seed, but for modes there are not."""
    chance = random.Random(seed)
    lease = chance.choice(LEASES)
    return Scenario(
        seed,
        store=chance.choice(("tcp", "file")),
        rows=chance.choice((200, 200, 2_000, 30_000)),
        lease=lease,
        receive_seconds=chance.choice((0.1, 0.4, 1.0)),
        steps=tuple(_Drawing(chance, lease, modes, seed % PROPOSED == 0).steps()),
    )


@dataclass
class _Drawing:
    """Who is there while a scenario is drawn."""

    chance: random.Random
    lease: float
    modes: tuple[Mode, ...]
    proposed: bool = False
    named: set[str] | None = field(default_factory=set)
    trainers: int = 0
    replicas: dict[int, Join] = field(default_factory=dict)
    names: int = 0
    free: list[str] = field(default_factory=list)
    slow: bool = False
    made: list[Step] = field(default_factory=list)

    def steps(self) -> list[Step]:
        first = [self._start, self._join]
        if self.chance.random() < 0.3:
            first.reverse()
        for draw_one in first:
            draw_one()
        for _ in range(self.chance.randint(3, 7)):
            self._any()
        return self.made

    def _any(self) -> None:
        if not self.trainers:
            self.chance.choice((self._start, self._join))()
            return
        weights = {
            self._join: 6,
            self._leave: 3,
            self._kill: 5,
            self._freeze: 3,
            self._outlast: 4,
            self._kill_trainer: 1,
            self._freeze_trainer: 1,
            self._outlast_trainer: 1,
            self._close_trainers: 1,
        }
        if self.proposed:
            weights |= {self._exclude: 4, self._admit_all: 1}
        (chosen,) = self.chance.choices(list(weights), list(weights.values()))
        chosen()

    def _start(self) -> None:
        if self.trainers:
            return
        self.trainers = self.chance.choice((1, 2, 2))
        self._add(Start(self.trainers), ("now",))

    def _join(self) -> None:
        if len(self.replicas) >= MAX_REPLICAS:
            return
        number = sum(isinstance(step.action, Join) for step in self.made)
        ranks = self.chance.choice((1, 2))
        mode = self.chance.choice(MODES)
        mode = mode if mode in self.modes else "staged"
        stays = self.chance.random() < 0.4
        join = Join(number, self._name(), ranks, mode, stays)
        self.replicas[number] = join
        first = self.chance.random() < 0.5
        if first:
            self._name_too(join.name, ("now", "between", "during"))
        self._add(join, ("now", "between", "during"))
        if not first:
            self._name_too(join.name, ("now", "forming", "forming", "between"))

    def _name_too(self, name: str, moments: tuple[Moment, ...]) -> None:
        """Propose one more, unless it is admitted anyhow."""
        if self.proposed and self.named is not None and name not in self.named:
            self.named.add(name)
            self._propose(moments)

    def _exclude(self) -> None:
        """Propose all but one; it ends, and its name is free."""
        if not self.replicas:
            return
        replica = self._forget()
        if self.named is None:
            self.named = {f"gen-{number + 1}" for number in range(self.names)}
        self.named.discard(replica.name)
        self._propose(self._moments(replica), replica.replica)

    def _admit_all(self) -> None:
        self.named = None
        self._propose(("now", "between", "during"))

    def _propose(self, moments: tuple[Moment, ...], without: int | None = None) -> None:
        names = None if self.named is None else tuple(sorted(self.named))
        rank = self.chance.randrange(2)
        self._add(Propose(names, rank, without), moments)

    def _name(self) -> str:
        if self.free and self.chance.random() < 0.6:
            return self.free.pop(self.chance.randrange(len(self.free)))
        self.names += 1
        return f"gen-{self.names}"

    def _leave(self) -> None:
        if self.replicas:
            replica = self._forget()
            self._strike(Leave(replica.replica), replica)

    def _kill(self) -> None:
        if self.replicas:
            replica = self._forget()
            rank = self.chance.randrange(replica.ranks)
            self._strike(Kill(replica.replica, rank), replica)

    def _freeze(self) -> None:
        if self.replicas:
            replica = self.chance.choice(list(self.replicas.values()))
            rank = self.chance.randrange(replica.ranks)
            self._strike(Freeze(replica.replica, rank, self._seconds()), replica)

    def _seconds(self) -> float:
        """Most freezes are short; a long one outlasts a push, once in a scenario."""
        if self.slow or self.chance.random() < 0.6:
            return round(self.chance.uniform(0.02, 0.3), 3)
        self.slow = True
        return round(self.chance.uniform(1.1, 1.6) * FROZEN_PUSH_SECONDS, 3)

    def _outlast(self) -> None:
        """Whoever is frozen for so long is removed, and its name is free."""
        if self.slow or not self.replicas:
            return
        self.slow = True
        replica = self._forget()
        rank = self.chance.randrange(replica.ranks)
        self._strike(Outlast(replica.replica, rank, self._beyond_lease()), replica)

    def _beyond_lease(self) -> float:
        return round(self.lease + self.chance.uniform(0.8, 2.0), 3)

    def _kill_trainer(self) -> None:
        moments = self._moments_of_a_job()
        self._add(KillTrainer(self._end_job()), moments)

    def _close_trainers(self) -> None:
        moments = self._moments_of_a_job()
        self._end_job()
        self._add(CloseTrainers(), moments)

    def _outlast_trainer(self) -> None:
        if self.slow:
            return
        self.slow = True
        seconds, moments = self._beyond_lease(), self._moments_of_a_job()
        self._add(OutlastTrainer(self._end_job(), seconds), moments)

    def _end_job(self) -> int:
        """Choose the trainer rank by which the job ends, and who does not stay."""
        rank = self.chance.randrange(self.trainers)
        self.trainers = 0
        everybody = self.replicas.values()
        self.free += [replica.name for replica in everybody if not replica.stays]
        self.replicas = {join.replica: join for join in everybody if join.stays}
        return rank

    def _freeze_trainer(self) -> None:
        seconds = round(self.chance.uniform(0.02, 0.3) * self.lease, 3)
        rank = self.chance.randrange(self.trainers)
        self._add(FreezeTrainer(rank, seconds), self._moments_of_a_job())

    def _forget(self) -> Join:
        replica = self.replicas.pop(self.chance.choice(list(self.replicas)))
        self.free.append(replica.name)
        return replica

    def _strike(self, action: Action, replica: Join) -> None:
        """Something happens to a replica; while it forms, if it joins just now."""
        self._add(action, self._moments(replica))

    def _moments(self, replica: Join) -> tuple[Moment, ...]:
        if self._newest is replica:
            return ("forming", "forming", "during")
        return ("between", "during", "during", "now")

    def _moments_of_a_job(self) -> tuple[Moment, ...]:
        forming: tuple[Moment, ...] = () if self._newest is None else ("forming",) * 2
        return ("between", "during", *forming)

    @property
    def _newest(self) -> Join | None:
        """The replica that joins just now, if one does."""
        actions = [step.action for step in self.made]
        last = next((a for a in reversed(actions) if not isinstance(a, Propose)), None)
        return last if isinstance(last, Join) else None

    def _add(self, action: Action, moments: tuple[Moment, ...]) -> None:
        moment = self.chance.choice(moments)
        longest = {"forming": 0.08, "during": 0.012}.get(moment, 0.15)
        delay = round(longest * self.chance.random() ** 2, 4)
        self.made.append(Step(action, moment, delay))
