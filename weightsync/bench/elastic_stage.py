"""Directs the processes of the case ``elastic``, and keeps what they measured."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from weightsync.bench.elastic_ranks import (
    First,
    Flow,
    Flowed,
    Kept,
    Opened,
    Place,
    Push,
    Pushed,
    Wait,
    burn,
    generate,
    hold,
    train,
)
from weightsync.bench.runner import Child, Processes, RunError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from typing import Self

WAIT_SECONDS: Final = 120.0
FLOW_SECONDS: Final = 0.3
SHORT_SECONDS: Final = 0.1
LATER_SECONDS: Final = 0.3
"""Whatever a death leaves to be done is done by then."""

STRIKES: Final = 20

Kind = Literal["alone", "burn", "join", "both", "stranger", "death", "after"]


class Stage:
    """Trainer ranks and the replica A, which stays; others come and go."""

    def __init__(self, nbytes: int, trainers: int) -> None:
        self._nbytes: Final = nbytes
        self._world: Final = trainers
        self._started: Final = Processes()
        self._names = 0
        self._address = "tcp://127.0.0.1:0"
        self._trainers: Final[list[Child]] = []
        self.version = 0

    def __enter__(self) -> Self:
        """Start those who stay."""
        for rank in range(self._world):
            arguments = (self._nbytes, rank, self._world, self._address)
            child = self.start(f"trainer {rank}", train, *arguments)
            self._address = self.hear(child)
            self._trainers.append(child)
        self._a = self._join(Place("A", "swap"))
        self.hear(self._a)
        self.order(Wait(1))
        return self

    def __exit__(self, *_: object) -> None:
        """End every process that was started."""
        self._started.__exit__()

    def start(self, name: str, function: Callable[..., Any], *arguments: Any) -> Child:
        """Start a process."""
        return self._started.start(name, function, *arguments)

    def hear(self, child: Child) -> Any:
        """Return what a process says next."""
        return self._started.gather([child], WAIT_SECONDS)[0]

    def prepare(self, place: Place) -> tuple[Child, int]:
        """Start a rank of a replica, which then waits for the word; and its pid."""
        name = f"generator {place.name}.{place.rank}"
        child = self.start(name, generate, self._nbytes, place, self._address)
        return child, self.hear(child)

    def stranger(self) -> tuple[Child, int]:
        """Start a process of no pool that has as much memory as B; and its pid."""
        child = self.start("stranger", hold, self._nbytes)
        return child, self.hear(child)

    def start_burner(self) -> Child:
        """Start a process of no pool that takes memory and time as B does."""
        return self.start("burner", burn, self._nbytes)

    def next_name(self) -> str:
        """Return a name that no replica had."""
        self._names += 1
        return f"B{self._names}"

    def order(self, order: object) -> list[Any]:
        """Give all trainer ranks an order; return their answers."""
        for trainer in self._trainers:
            trainer.tell(order)
        return self._started.gather(self._trainers, WAIT_SECONDS)

    def push(self, victim: int | None = None, delay: float = 0.0) -> list[Pushed]:
        """Push once, on all trainer ranks; a process may be killed in it."""
        self.version += 1
        return self.order(Push(self.version, victim, delay))

    def strike(self, place: Place) -> float:
        """Let a replica join, whose last rank meets its fate in the middle of a push.

        Return the seconds from then until the push has returned on all trainer ranks.
        Where other work keeps it from dying before the push is over, another has to.
        """
        for _ in range(STRIKES):
            pushed, struck = self._strike(place)
            if all(push.failed for push in pushed):
                return max(push.returned for push in pushed) - struck
        raise RunError(f"no push of {STRIKES} lasted until a generator had died in it")

    def _strike(self, place: Place) -> tuple[list[Pushed], float]:
        name, last = self.next_name(), place.world - 1
        found = [
            self._join(
                place._replace(
                    name=name, rank=rank, fate=place.fate if rank == last else None
                )
            )
            for rank in range(place.world)
        ]
        for child in found:
            self.hear(child)
        self.order(Wait(2))
        pushed = self.push()
        struck: float = self.hear(found[-1])
        for child in found:
            child.kill()
        if any("A" not in push.delivered for push in pushed):
            raise RunError(f"a push beside one that fails: {pushed}")
        return pushed, struck

    def flow(self, name: str, during: Callable[[], None]) -> Flowed:
        """Let the one trainer rank push again and again during something."""
        (trainer,) = self._trainers
        trainer.tell(Flow(self.version + 1, name))
        during()
        trainer.tell("stop")
        flowed: Flowed = self.hear(trainer)
        self.version = flowed.pushes[-1].version
        return flowed

    def end(self) -> Kept:
        """End those who stayed; return what A has seen and compared."""
        self._a.tell("end")
        said = self.hear(self._a)
        while not isinstance(said, Kept):
            said = self.hear(self._a)
        for trainer in self._trainers:
            trainer.tell(None)
        return said

    def _join(self, place: Place) -> Child:
        child, _ = self.prepare(place)
        child.tell("join")
        return child


class Cycles:
    """B joins beside running pushes and dies in one of them, over and over.

    ``visible`` are, by what happened meanwhile, the seconds from the call of a push
    until A has returned from ``receive``.
    """

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self._stage: Final = stage
        self._chance: Final = chance
        self._burner: Final = stage.start_burner()
        self._cpu = 0.1
        self._pushes: Final[dict[Kind, list[Pushed]]] = {
            "alone": [],
            "burn": [],
            "join": [],
            "both": [],
            "stranger": [],
            "death": [],
            "after": [],
        }
        self.joined: Final[list[float]] = []
        self.first: Final[list[float]] = []
        self.visible: dict[Kind, list[float]] = {}
        stage.hear(self._burner)

    def run(self, cycles: int) -> int:
        """Carry all out, after one for warming up; return the bytes that A compared."""
        self._cycle()
        self.joined.clear()
        self.first.clear()
        for pushes in self._pushes.values():
            pushes.clear()
        for _ in range(cycles):
            self._cycle()
        self._burner.tell(None)
        kept = self._stage.end()
        for kind, pushes in self._pushes.items():
            self.visible[kind] = [
                kept.seen[push.version] - push.called for push in pushes
            ]
        return kept.verified

    def _cycle(self) -> None:
        name = self._stage.next_name()
        b, pid = self._stage.prepare(Place(name, "swap"))
        stranger, other = self._stage.stranger()
        for turn in self._chance.sample((self._alone, self._burn), 2):
            turn()
        self._join(b, name)
        both = self._flow()
        self._pushes["both"] += both
        usual = median([push.returned - push.called for push in both])
        self._pushes["stranger"] += self._kill(other, usual)
        self._pushes["death"] += self._kill(pid, usual)
        stranger.kill()
        b.kill()
        self._pushes["after"] += self._flow()
        time.sleep(LATER_SECONDS)

    def _kill(self, pid: int, usual: float) -> list[Pushed]:
        """Kill a process at a random moment of a push."""
        pushed = self._stage.push(pid, usual * self._chance.random())
        time.sleep(SHORT_SECONDS)
        return pushed

    def _alone(self) -> None:
        self._pushes["alone"] += self._flow()

    def _flow(self) -> list[Pushed]:
        return self._stage.flow("", lambda: time.sleep(FLOW_SECONDS)).pushes

    def _burn(self) -> None:
        """Push while a stranger takes as much memory and time as B until it has all."""
        span = 0.0, 0.0

        def during() -> None:
            nonlocal span
            self._pause()
            self._burner.tell(self._cpu)
            span = self._stage.hear(self._burner)
            self._pause()

        pushes = self._stage.flow("", during).pushes
        self._pushes["burn"] += _overlapping(pushes, *span)

    def _join(self, b: Child, name: str) -> None:
        opened, first = Opened(0.0, 0.0), First(0.0, 0.0)

        def during() -> None:
            nonlocal opened, first
            self._pause()
            b.tell("join")
            opened, first = self._stage.hear(b), self._stage.hear(b)

        flowed = self._stage.flow(name, during)
        self._cpu = first.cpu
        self.joined.append(flowed.joined - opened.entered)
        self.first.append(first.at - opened.entered)
        before = [push for push in flowed.pushes if name not in push.delivered]
        self._pushes["join"] += _overlapping(before, opened.entered, flowed.joined)

    def _pause(self) -> None:
        time.sleep(SHORT_SECONDS * self._chance.random())


def _overlapping(pushes: list[Pushed], begin: float, end: float) -> list[Pushed]:
    return [push for push in pushes if push.returned > begin and push.called < end]
