"""A network without sockets: processes, channels that lose things, and a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from weightsync.errors import PeerError, WeightSyncError

_CLOSED: Final = object()

Act = Callable[[], bool | None]
"""A step of a job: whether it has ended with that; None where it waits."""


class Timer:
    """What ``after`` returns: a call that is due at a time, unless it is cancelled."""

    def __init__(self, due: float, act: Callable[[], None]) -> None:
        self.due: Final = due
        self.act: Final = act
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Time that passes when the machine says so; timers fire in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def after(self, seconds: float, act: Callable[[], None]) -> Any:
        timer = Timer(self.now + seconds, act)
        self._timers.append(timer)
        return timer

    @property
    def pending(self) -> list[Timer]:
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        return sorted(self._timers, key=lambda timer: timer.due)

    def next(self, until: float) -> Timer | None:
        """Take the timer that is due next, if it is due by then; time passes."""
        pending = self.pending
        if not pending or pending[0].due > until:
            self.now = max(self.now, until)
            return None
        timer = pending[0]
        self._timers.remove(timer)
        self.now = max(self.now, timer.due)
        return timer


class Job:
    """Something that a process does beside its loop; it may take long."""

    def __init__(self, act: Act) -> None:
        self.act: Final = act


class Process:
    """What can die or freeze as a whole, with its ends of channels and its jobs."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.alive = True
        self.frozen = False
        self.disturbed = False
        self.wires: list[Wire] = []
        self.jobs: list[Job] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def start(self, act: Act) -> None:
        self.jobs.append(Job(act))

    def work(self, job: Job) -> bool:
        """Do one step of a job; whether there was anything to do."""
        ended = job.act()
        if ended and job in self.jobs:
            self.jobs.remove(job)
        return ended is not None

    def kill(self, keep: int) -> None:
        """Die; the first ``keep`` messages that are on the way still arrive."""
        self.alive = False
        self.jobs.clear()
        for wire in self.wires:
            wire.inbox.clear()
            wire.other.cut(keep)


class Wire:
    """One end of a channel, with what is on its way to it. Stands in for ``Peer``."""

    lease = 10.0
    silent = 0.0

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process: Final = process
        self.other: Wire = self
        self.inbox: deque[Any] = deque()
        self.held = False
        self.lost: WeightSyncError | None = None
        self.posted: Callable[[Any], None] = lambda message: None
        self.handle: Callable[[Any], None] = lambda message: None
        self.ended: Callable[[WeightSyncError], None] = lambda error: None
        self._finishing = False
        self._cut = False
        process.wires.append(self)

    @property
    def local(self) -> bool:
        """Whether both ends are of one process: then nothing is late, or lost."""
        return self.process is self.other.process

    @property
    def ready(self) -> bool:
        return bool(self.inbox) and self.process.runs and not self.held

    # What a ``Peer`` offers

    def post(self, message: object) -> None:
        if self.lost is None and not self._finishing:
            self.posted(message)
            self._send(message)

    def finish(self) -> None:
        if not self._finishing:
            self._send(_CLOSED)
        self._finishing = True

    def drop(self, error: WeightSyncError) -> None:
        self.close(error)

    def _send(self, message: object) -> None:
        if not self.other._cut and self.other.process.alive:
            self.other.inbox.append(message)

    # What the network does

    def deliver(self) -> None:
        message = self.inbox.popleft()
        if message is _CLOSED:
            self.close(PeerError(f"{self.name} closed the connection"))
        elif self.lost is None and not self._finishing:
            try:
                self.handle(message)
            except WeightSyncError as error:
                self.close(error)

    def close(self, error: WeightSyncError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        if not self._finishing:
            self._send(_CLOSED)
        self.ended(error)

    def cut(self, keep: int) -> None:
        """Lose all but the first messages that are on the way, and everything later."""
        while len(self.inbox) > keep:
            self.inbox.pop()
        self._cut = True
        self.inbox.append(_CLOSED)

    def expire(self) -> None:
        """The lease ends: nothing was heard of the other side."""
        self.close(PeerError(f"{self.name} gave no sign of life for {self.lease:g} s"))


def connect(first: Process, second: Process) -> tuple[Wire, Wire]:
    """Connect two processes; each end is called as the other side."""
    mine, theirs = Wire(second.name, first), Wire(first.name, second)
    mine.other, theirs.other = theirs, mine
    return mine, theirs
