"""A pool on emulated NCCL in which one process has faults; each tells them in a log."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.processes import driven
from tests.processes.driven import MIB, Held, Outcome, ask, call
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Child, Control

NUMEL: Final = 20 * MIB
TRAINERS: Final = 2
PUTS: Final = 3
"""Of one trainer rank to one replica in a push: 8 MiB, 2 MiB, the header."""

TIMEOUT: Final = 3.0
GRACE: Final = 3.0
"""So much longer than its timeout may a push take in which something fails."""

HANG: Final = "nothing moves since"
PHASES: Final = {
    "opened": "between",
    "pushed": "between",
    "received": "between",
    "closed": "after",
}
"""What ends a phase, and which one begins then."""
CALLED: Final = "calls while it closed:"


def logged(
    control: Control,
    path: str,
    injected: str,
    function: Callable[..., Any],
    *args: object,
) -> Any:
    """Call a function with everything that is told on stderr in a file.

    ``injected`` are faults of functions while it opens its transport.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    watched = Watched(injected)
    control.reach = watched.reach
    control.calls = {
        "calls": watched.calls,
        "inject": watched.inject,
        "leave_free": watched.leave_free,
    }
    return function(control, *args)


class Watched:
    """What a process calls of CUDA and NCCL in each of its phases, and what fails.

    The faults of functions are injected when the next phase begins and are over with
    it, those of the first when it has received or pushed for the first time.
    """

    def __init__(self, injected: str) -> None:
        self._next = injected
        self._injected = False
        self._phase = "before"
        self._before: Counter[str] = Counter()
        self._found: dict[str, Counter[str]] = {}
        self._ballast: torch.Tensor | None = None

    def reach(self, what: str) -> None:
        """Tell the calls of what ends here, on stderr too, and inject the faults."""
        self._count()
        self._phase = PHASES.get(what, what)
        if self._next:
            self._inject(self._next)
            self._next = ""
        elif self._injected and what in PHASES and what != "opened":
            self._inject("")
        if what == "closed":
            print(CALLED, json.dumps(self._found["closing"]), file=sys.stderr)

    def _count(self) -> None:
        now = Counter(testing.calls())
        found = self._found.setdefault(self._phase, Counter())
        found.update(now - self._before)
        self._before = now

    async def calls(self) -> dict[str, dict[str, int]]:
        """Return what was called in each phase since this was asked last."""
        self._count()
        found, self._found = self._found, {}
        return {phase: dict(calls) for phase, calls in found.items()}

    async def inject(self, faults: str, *, now: bool = False) -> None:
        """Let functions fail in the next phase, or now."""
        if now:
            self._inject(faults)
        else:
            self._next = faults

    async def leave_free(self, nbytes: int | None) -> None:
        """Take the memory of this GPU but for so much; with None give it back."""
        self._ballast = None
        torch.cuda.empty_cache()
        if nbytes is not None:
            taken = torch.cuda.mem_get_info()[0] - nbytes
            self._ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")

    def _inject(self, faults: str) -> None:
        testing.inject(faults)
        self._injected = bool(faults)


@dataclass
class Pool:
    """Two trainer ranks and replicas of one rank each; every one has its log."""

    processes: EmulatedProcesses
    address: str
    logs: Path
    trainers: list[Child] = field(default_factory=list)
    replicas: dict[str, Child] = field(default_factory=dict)
    nccl: str = "2.30.7"
    numel: int = NUMEL
    straight: bool = False
    """Whether trainer ranks put straight from their tensors."""
    segment: int | None = None
    """Of the windows of replicas that start from now on, in bytes; else the usual."""

    def _start(self, name: str, faults: str, function: Any, *args: object) -> Child:
        self.processes.faults, injected = _parted(faults)
        self.processes.nccl = self.nccl
        path = str(self.logs / name)
        return self.processes.start(logged, path, injected, function, *args, name=name)

    def train(self, faults: str = "", count: int = TRAINERS) -> None:
        """Start the trainer ranks; the last of them has the faults."""
        for rank in range(count):
            place = (self.address, rank, count, self.numel, 10.0, "cuda", False)
            mine = faults if rank == count - 1 else _networks(faults)
            options = (*place, self.straight)
            child = self._start(f"trainer-{rank}", mine, driven.trainer, *options)
            self.trainers.append(child)
        for trainer in self.trainers:
            assert "open" == trainer.hear()

    def start(self, name: str, faults: str = "", mode: str = "staged") -> Child:
        """Start a replica."""
        place = (self.address, name, 0, 1, self.numel, mode, 10.0, "cuda")
        options = (*place, self.segment)
        self.replicas[name] = self._start(name, faults, driven.generator, *options)
        return self.replicas[name]

    def join(self, name: str, faults: str = "", mode: str = "staged") -> Child:
        """Start a replica, and wait until it is in the pool."""
        child = self.start(name, faults, mode)
        assert "open" == child.hear()
        self.joined(len(self.replicas))
        return child

    def joined(self, count: int) -> None:
        """Wait until there are so many replicas."""
        for trainer in self.trainers:
            found = call(trainer, "wait_for_replicas", count=count, timeout=20)
            assert "ok" == found.kind, found

    def begin(self, version: int, *names: str) -> None:
        """Push on all trainer ranks, and receive on these replicas."""
        for name in names:
            ask(self.replicas[name], "receive", timeout=15)
        for trainer in self.trainers:
            ask(trainer, "push", version=version, timeout=TIMEOUT)

    def pushed(self) -> list[Outcome]:
        """How the push ended on each trainer rank, in time."""
        outcomes: list[Outcome] = [trainer.hear() for trainer in self.trainers]

        assert max(each.seconds for each in outcomes) < TIMEOUT + GRACE
        return outcomes

    def received(self, name: str) -> tuple[Outcome, Held]:
        """How a receive ended, and what is held then."""
        outcome = self.replicas[name].hear()
        return outcome, call(self.replicas[name], "held").value

    def deliver(self, version: int, *names: str) -> None:
        """Push a version, which these replicas and no others get, every byte of it."""
        self.begin(version, *names)
        outcomes = self.pushed()
        got = [self.received(name) for name in names]

        assert ["ok"] * len(outcomes) == [each.kind for each in outcomes], outcomes
        for outcome in outcomes:
            assert (set(names), {}) == (
                set(outcome.value.delivered),
                outcome.value.failed,
            )
        for outcome, held in got:
            assert "ok" == outcome.kind, outcome
            assert Held(version, version) == held

    def come_back(self, name: str, version: int) -> None:
        """A replica that was removed joins again, and all get the next push."""
        ask(self.replicas[name], "receive", timeout=15)
        self.joined(len(self.replicas))
        others = [each for each in self.replicas if each != name]
        self.begin(version, *others)
        outcomes = self.pushed()
        got = [self.received(each) for each in self.replicas]

        assert ["ok"] * len(outcomes) == [each.kind for each in outcomes], outcomes
        assert set(self.replicas) == set(outcomes[0].value.delivered)
        assert [Held(version, version)] * len(got) == [held for _, held in got], got

    def close_trainers(self) -> None:
        """Close the trainer ranks that are left, of which the last has died."""
        self.trainers.pop().join()
        driven.close(*self.trainers)
        self.trainers.clear()

    def close(self) -> float:
        """Close all that are left; return the seconds of the slowest."""
        return driven.close(*self.trainers, *self.replicas.values())

    def told(self, name: str) -> str:
        """What a process has told on stderr."""
        return (self.logs / name).read_text()

    def faults(self, name: str) -> int:
        """How many faults a process has had."""
        return len(re.findall(", as the fault '", self.told(name)))

    def child(self, name: str) -> Child:
        """The process that has this log."""
        if name in self.replicas:
            return self.replicas[name]
        return self.trainers[int(name.rpartition("-")[2])]

    def inject(self, name: str, faults: str, *, now: bool = False) -> None:
        """Let functions fail in a process in its next phase, or now."""
        injected = call(self.child(name), "inject", faults=faults, now=now)
        assert "ok" == injected.kind, injected

    def called(self, *names: str) -> dict[str, set[str]]:
        """What these processes have called in each phase since this was asked last."""
        found: dict[str, set[str]] = {}
        for name in names:
            for phase, calls in call(self.child(name), "calls").value.items():
                found.setdefault(phase, set()).update(calls)
        return found

    @property
    def hangs(self) -> list[str]:
        """Whose hang was diagnosed."""
        return [each.name for each in self.logs.iterdir() if HANG in each.read_text()]

    def calls(self, name: str) -> dict[str, int]:
        """How often a process with the fault ``*:trace`` has called what."""
        found = re.findall(r"calls (\w+), occurrence (\d+)", self.told(name))
        return {operation: int(count) for operation, count in found}


def _entries(faults: str) -> list[str]:
    return [entry.strip() for entry in faults.split(";")]


def _parted(faults: str) -> tuple[str, str]:
    """What a process begins with, and the functions that fail from its opening on."""
    entries = _entries(faults)
    functions = [entry for entry in entries if re.match("(nccl|cu|cuda)[A-Z]", entry)]
    rest = [entry for entry in entries if entry not in functions]
    return "; ".join(rest), "; ".join(functions)


def _networks(faults: str) -> str:
    """Who reaches whom through a network: all have to know that."""
    found = _entries(faults)
    return "; ".join(each for each in found if each.startswith("network"))
