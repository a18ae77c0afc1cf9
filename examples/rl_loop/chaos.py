"""Chaos for rl_loop.py: generators die, freeze and come while the model learns.

Two parts play here. One strikes: it kills a generator with SIGKILL, stops one with
SIGSTOP for longer than its lease, and adds one, in turn, at random moments. The other
is what a scheduler does: it starts a generator again that has ended, under the same
name, and says nothing to the trainers. They learn from weightsync who is there.

One generator at least is always left alone, for samples must come from somewhere.
"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import cycle
from typing import TYPE_CHECKING, Protocol

from weightsync import MembershipEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

LEASE = 3.0  # seconds without a sign of life: short, so that one sees what follows
FROZEN = 2 * LEASE
PAUSES = (0.5, 2.0)  # seconds between two strikes, where enough generators are there


class Child(Protocol):
    """What is known of a process: see processes.py."""

    name: str
    process: BaseProcess
    ended: bool

    def stop(self) -> None:
        """End it whatever it does."""


class Chaos:
    """Strikes generators, and starts them again; ``act`` is called all the time."""

    def __init__(
        self, generators: list[Child], launch: Callable[[int], Child], seed: int
    ) -> None:
        self.strikes: list[str] = []
        self._children = {child.name: child for child in generators}
        self._launch = launch  # starts the generator with this number
        self._most = len(generators) + 1
        self._random = random.Random(seed)  # noqa: S311 -- nothing secret.
        self._kinds = cycle((self._kill, self._freeze, self._add))
        self._members: set[str] = set()  # the generators in the pool, by its events
        self._struck: set[str] = set()
        self._frozen: dict[str, float] = {}  # until when
        self._next = 0.0
        self._learning = False

    def heard(self, report: object) -> None:
        """The trainers say who joined, left or failed; whatever else is of learning."""
        if isinstance(report, MembershipEvent):
            print("members:", report, flush=True)
            self._note(report)
        else:
            self._learning = True

    def _note(self, event: MembershipEvent) -> None:
        if event.role != "replica":
            return
        if event.kind == "joined":
            self._members.add(event.name)
            self._struck.discard(event.name)
        else:
            self._members.discard(event.name)

    def act(self) -> None:
        """Let frozen ones go on; strike if it learns, it is time and two are well."""
        now = time.monotonic()
        for name, until in list(self._frozen.items()):
            if now >= until:
                del self._frozen[name]
                self._signal(name, signal.SIGCONT)
        if not self._learning or len(self._well()) < 2:
            self._next = now + self._random.uniform(*PAUSES)
        elif now >= self._next:
            next(self._kinds)()
            self._next = now + self._random.uniform(*PAUSES)

    def replaces(self, child: Child) -> bool:
        """Start a generator again if its end is our doing; otherwise it is a fault."""
        if child.name not in self._struck:
            return False
        child.process.join()
        self._start(int(child.name.removeprefix("gen-")))
        return True

    def finish(self) -> None:
        """The trainers have closed: who does not know cannot end by itself."""
        for name, child in self._children.items():
            if name not in self._well() and not child.ended:
                child.stop()
                child.ended = True

    def _well(self) -> list[str]:
        return sorted(self._members - self._struck)

    def _kill(self) -> None:
        name = self._strike("killed")
        self._signal(name, signal.SIGKILL)

    def _freeze(self) -> None:
        name = self._strike("frozen")
        self._frozen[name] = time.monotonic() + FROZEN
        self._signal(name, signal.SIGSTOP)

    def _add(self) -> None:
        if len(self._children) < self._most:
            self._start(len(self._children))
            self._say(f"gen-{len(self._children) - 1} added")

    def _strike(self, what: str) -> str:
        name = self._random.choice(self._well())
        self._struck.add(name)
        self._say(f"{name} {what}")
        return name

    def _start(self, index: int) -> None:
        child = self._launch(index)
        self._children[child.name] = child

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._children[name].process.pid
        if pid is not None:
            os.kill(pid, number)

    def _say(self, what: str) -> None:
        self.strikes.append(what)
        print("chaos:", what, flush=True)
