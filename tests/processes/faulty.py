"""A pool on emulated NCCL in which one process has faults; each tells them in a log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.processes import driven
from tests.processes.driven import MIB, Held, Outcome, ask, call

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


def logged(
    control: Control, path: str, function: Callable[..., Any], *args: object
) -> Any:
    """Call a function with everything that is told on stderr in a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    return function(control, *args)


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

    def _start(self, name: str, faults: str, function: Any, *args: object) -> Child:
        self.processes.faults = faults
        self.processes.nccl = self.nccl
        path = str(self.logs / name)
        return self.processes.start(logged, path, function, *args, name=name)

    def train(self, faults: str = "", count: int = TRAINERS) -> None:
        """Start the trainer ranks; the last of them has the faults."""
        for rank in range(count):
            place = (self.address, rank, count, self.numel, 10.0, "cuda")
            mine = faults if rank == count - 1 else _networks(faults)
            child = self._start(f"trainer-{rank}", mine, driven.trainer, *place)
            self.trainers.append(child)
        for trainer in self.trainers:
            assert "open" == trainer.hear()

    def start(self, name: str, faults: str = "", mode: str = "staged") -> Child:
        """Start a replica."""
        place = (self.address, name, 0, 1, self.numel, mode, 10.0, "cuda")
        self.replicas[name] = self._start(name, faults, driven.generator, *place)
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

    @property
    def hangs(self) -> list[str]:
        """Whose hang was diagnosed."""
        return [each.name for each in self.logs.iterdir() if HANG in each.read_text()]

    def calls(self, name: str) -> dict[str, int]:
        """How often a process with the fault ``*:trace`` has called what."""
        found = re.findall(r"calls (\w+), occurrence (\d+)", self.told(name))
        return {operation: int(count) for operation, count in found}


def _networks(faults: str) -> str:
    """Who reaches whom through a network: all have to know that."""
    entries = [entry.strip() for entry in faults.split(";")]
    return "; ".join(each for each in entries if each.startswith("network"))
