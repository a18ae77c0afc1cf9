"""The processes of a scenario, and all that is known of each."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.chaos.words import Call, Census, Doing, Held, Replicas, Torn
from tests.processes.harness import ChildError

if TYPE_CHECKING:
    from tests.chaos.scenario import Join
    from tests.processes.harness import Child


class Process:
    """One rank. ``calls`` are in the order in which they ended."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.doing: str | None = None
        self.calls: list[Call] = []
        self.held: Held | None = None
        self.torn: list[Torn] = []
        self.census: list[Census] = []
        self.replicas: list[tuple[str, ...]] = []
        self._counted = False
        self.killed = False
        self.told_to_end: float | None = None
        self.over = False
        self.frozen_until: float | None = None
        self.frozen_seconds = 0.0
        self.outlasting = False
        self.removed = False
        self.excluded = False

    def __repr__(self) -> str:
        return self.child.name

    def fileno(self) -> int:
        """Let ``multiprocessing.connection.wait`` wait for what it says."""
        return self.child.fileno()

    def take(self) -> None:
        """Take what it said, or its end."""
        try:
            kind, said = self.child.next(0.0)
        except ChildError:
            self.over = True
            if not self.killed:
                raise
            return
        self.over = kind == "returned"
        self._note(said)

    def _note(self, said: Any) -> None:
        match said:
            case Doing(name):
                self.doing = name
            case Call():
                self.calls.append(said)
            case Held():
                self.held = said
            case Torn():
                self.torn.append(said)
            case Census():
                self.census.append(said)
            case Replicas(names):
                self.replicas.append(names)

    def say(self, order: object) -> None:
        """Tell it something, unless it is gone."""
        if not self.killed and not self.over:
            self.child.say(order)

    def count_once(self) -> None:
        """Let it count what it has open, for the first time."""
        if not self._counted and self.told_to_end is None:
            self._counted = True
            self.say("census")

    def end(self, order: str) -> None:
        """Tell it to end, once."""
        if self.told_to_end is None:
            self.told_to_end = time.monotonic()
            self.say(order)

    def kill(self) -> None:
        """Kill it, frozen or not."""
        self.killed = True
        self.frozen_until = None
        self._signal(signal.SIGKILL)

    def freeze(self, seconds: float, *, outlasting: bool = False) -> None:
        """Stop it for some seconds from now; whether they outlast its lease."""
        if self.killed or self.over:
            return
        self.outlasting = self.outlasting or outlasting
        now = time.monotonic()
        self.frozen_until = max(self.frozen_until or 0.0, now + seconds)
        self.frozen_seconds += seconds
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.frozen_until = None
        self.outlasting = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself
            self.child.kill(number)

    def call(self, name: str) -> Call | None:
        """Return how its last call of a name ended."""
        found = [call for call in self.calls if call.name == name]
        return found[-1] if found else None

    def lost(self, kind: str, who: str, since: int = 0) -> bool:
        """Whether a receive said that it is out of the pool, and whose fault that is.

        ``since`` is how many of its calls had ended before.
        """
        return any(
            call.name == "receive" and call.kind == kind and who in call.text
            for call in self.calls[since:]
        )

    def count(self, name: str) -> int:
        """Return how many of its calls of a name have ended."""
        return sum(call.name == name for call in self.calls)

    @property
    def opened(self) -> bool:
        """Whether it has joined."""
        call = self.call("open")
        return call is not None and call.kind == "ok"

    @property
    def alive(self) -> bool:
        """Whether it was not killed, and has not ended."""
        return not self.killed and not self.over

    @property
    def closed(self) -> bool:
        """Whether it is through with its transport."""
        opening = self.call("open")
        refused = opening is not None and opening.kind != "ok"
        return self.over or self.call("close") is not None or refused

    @property
    def versions(self) -> list[int]:
        """The versions that it received."""
        received = [call.version for call in self.calls if call.name == "receive"]
        return [version for version in received if version is not None]


@dataclass(eq=False, repr=False, slots=True)
class Replica:
    """A replica of a scenario. ``marks`` are what happened to it.

    It ``returns`` when trainers start again, if it was in the pool and stays. It
    ``breaks`` if a rank of it dies while it is in the pool.
    """

    join: Join
    processes: list[Process]
    marks: set[str] = field(default_factory=set)
    returns: bool = False
    breaks: bool = False

    @property
    def name(self) -> str:
        return self.join.name

    @property
    def stays(self) -> bool:
        """Whether it joins again by itself, and all of its ranks are there for that."""
        return self.join.stays and all(process.alive for process in self.processes)

    @property
    def untouched(self) -> bool:
        """Whether nothing has happened to it."""
        return not self.marks

    @property
    def opened(self) -> bool:
        """Whether all of its ranks have joined."""
        return all(process.opened for process in self.processes)

    @property
    def received(self) -> bool:
        """Whether all of its ranks have received a version."""
        return all(process.versions for process in self.processes)

    def __repr__(self) -> str:
        marks = ", ".join(sorted(self.marks)) or "untouched"
        return f"{self.join.name}#{self.join.replica} ({self.join.mode}, {marks})"


class Push:
    """One push of some ``seconds``: who was asked, and how the calls ended.

    ``disturbed`` says that something happened to a trainer rank meanwhile.
    """

    def __init__(self, version: int, ranks: list[Process], seconds: float) -> None:
        self.version = version
        self.seconds = seconds
        self.ranks = ranks
        self.began = time.monotonic()
        self.calls: dict[int, Call] = {}
        self.disturbed = False

    def take(self) -> None:
        """Look which calls have ended."""
        for rank, process in enumerate(self.ranks):
            call = process.call("push")
            if call is not None and call.version == self.version:
                self.calls[rank] = call

    @property
    def over(self) -> bool:
        """Whether all calls have ended that can, those of a frozen rank later."""
        self.take()
        return all(
            rank in self.calls or not process.alive or process.outlasting
            for rank, process in enumerate(self.ranks)
        )


class Limits(NamedTuple):
    """The timeout of a push, and the seconds within which it must end."""

    seconds: float
    limit: float


class Job:
    """The trainer ranks of one start, and their pushes."""

    def __init__(self, ranks: list[Process]) -> None:
        self.ranks = ranks
        self.pushes: list[Push] = []
        self.victim: int | None = None

    @property
    def opened(self) -> bool:
        return all(rank.opened for rank in self.ranks)

    @property
    def pushing(self) -> Push | None:
        """The push under way."""
        last = self.pushes[-1] if self.pushes else None
        return None if last is None or last.over else last

    def disturb(self) -> None:
        """A trainer rank is struck: what pushes now may fail for it."""
        if self.pushes:
            self.pushes[-1].disturbed = True
