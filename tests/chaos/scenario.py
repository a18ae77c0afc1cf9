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


@dataclass(frozen=True, slots=True)
class Start:
    """Trainers start: the first ones, or new ones after all have gone."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Join:
    """A replica starts; ``replica`` is its number in the scenario."""

    replica: int
    name: str
    ranks: int
    mode: Mode


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
)


@dataclass(frozen=True, slots=True)
class Step:
    """An action and its moment; ``delay`` seconds pass after the moment began.

    "between": no push is under way. "during": one has begun. "forming": the replica of
    the step before has begun to join.
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

    def __str__(self) -> str:
        """Write it down, a step a line."""
        lines = [
            f"{step.moment} +{step.delay:.3f} s: {step.action}" for step in self.steps
        ]
        head = (
            f"seed {self.seed}: store {self.store}, {self.rows} rows, lease "
            f"{self.lease} s, receive {self.receive_seconds} s"
            f"{', replay' if self.replay else ''}"
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
        steps=tuple(_Drawing(chance, lease, modes).steps()),
    )


@dataclass
class _Drawing:
    """Who is there while a scenario is drawn."""

    chance: random.Random
    lease: float
    modes: tuple[Mode, ...]
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
        }
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
        self.replicas[number] = Join(number, self._name(), ranks, mode)
        self._add(self.replicas[number], ("now", "between", "during"))

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
        rank = self._end_job()
        self._add(KillTrainer(rank), ("between", "during"))

    def _outlast_trainer(self) -> None:
        if self.slow:
            return
        self.slow = True
        seconds = self._beyond_lease()
        self._add(OutlastTrainer(self._end_job(), seconds), ("between", "during"))

    def _end_job(self) -> int:
        """Choose the trainer rank by which the job ends, and with it all replicas."""
        rank = self.chance.randrange(self.trainers)
        self.trainers = 0
        self.free += [replica.name for replica in self.replicas.values()]
        self.replicas.clear()
        return rank

    def _freeze_trainer(self) -> None:
        seconds = round(self.chance.uniform(0.02, 0.3) * self.lease, 3)
        rank = self.chance.randrange(self.trainers)
        self._add(FreezeTrainer(rank, seconds), ("between", "during"))

    def _forget(self) -> Join:
        replica = self.replicas.pop(self.chance.choice(list(self.replicas)))
        self.free.append(replica.name)
        return replica

    def _strike(self, action: Action, replica: Join) -> None:
        """Something happens to a replica; while it forms, if it joins just now."""
        fresh = bool(self.made) and self.made[-1].action is replica
        moments: tuple[Moment, ...] = ("between", "during", "during", "now")
        self._add(action, ("forming", "forming", "during") if fresh else moments)

    def _add(self, action: Action, moments: tuple[Moment, ...]) -> None:
        moment = self.chance.choice(moments)
        longest = {"forming": 0.08, "during": 0.012}.get(moment, 0.15)
        delay = round(longest * self.chance.random() ** 2, 4)
        self.made.append(Step(action, moment, delay))
