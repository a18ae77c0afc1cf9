"""A pool of real processes: several trainer ranks, and replicas of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.processes import driven
from tests.processes.driven import MIB, Held, Outcome, ask, call

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes

SECONDS = 20.0
"""Timeout of what is not expected to time out."""


def mebibytes(count: int, engine: Engine) -> int:
    """So many MiB, and half of it on emulated GPUs, where putting them is slower."""
    return count * MIB // (1 if engine.device == "cpu" else 2)


class Pool:
    """Trainer ranks that push ``numel`` bytes of ``w``, and replicas by their names."""

    def __init__(
        self,
        processes: Processes,
        address: str,
        *,
        numel: int,
        trainers: int = 2,
        lease: float = 10.0,
    ) -> None:
        self.replicas: dict[str, list[Child]] = {}
        self._start = processes.start
        self._device = processes.device
        self._address = address
        self._numel = numel
        self._lease = lease
        self.trainers = self._open_trainers(trainers)

    def _open_trainers(self, count: int) -> list[Child]:
        arguments = (count, self._numel, self._lease, self._device)
        trainers = [
            self._start(
                driven.trainer, self._address, rank, *arguments, name=f"T{rank}"
            )
            for rank in range(count)
        ]
        for trainer in trainers:
            assert "open" == trainer.hear()
        return trainers

    def start(self, name: str, *, ranks: int = 1, mode: str = "staged") -> list[Child]:
        """Start the ranks of a replica, each of which holds all of ``w``."""
        place = (self._numel, mode, self._lease, self._device)
        self.replicas[name] = [
            self._start(
                driven.generator,
                *(self._address, name, rank, ranks, *place),
                name=f"{name}-{rank}",
            )
            for rank in range(ranks)
        ]
        return self.replicas[name]

    def join(self, name: str, *, ranks: int = 1, mode: str = "staged") -> list[Child]:
        """Let a replica join; return its ranks when all trainer ranks know of it."""
        found = self.start(name, ranks=ranks, mode=mode)
        for rank in found:
            assert "open" == rank.hear()
        self.until_joined()
        return found

    def until_joined(self) -> None:
        """Wait until all trainer ranks know of as many replicas as there are here.

        The answer of the leader comes after what it told before: so a trainer knows of
        those that were out when this began.
        """
        for trainer in self.trainers:
            assert "ok" == call(trainer, "membership").kind
            joined = call(trainer, "wait_for_replicas", count=len(self.replicas))
            assert "ok" == joined.kind

    def ranks(self, *names: str) -> list[Child]:
        """Return the ranks of some replicas, or of all."""
        return [rank for name in names or self.replicas for rank in self.replicas[name]]

    def begin(self, version: int, **options: object) -> None:
        """Start a push on all trainer ranks."""
        for trainer in self.trainers:
            ask(trainer, "push", version=version, **{"timeout": SECONDS, **options})

    def ended(self, *, but: Child | None = None) -> Outcome:
        """Return the outcome of a push, which is one on all trainer ranks."""
        outcomes: list[Outcome] = [
            trainer.hear() for trainer in self.trainers if trainer is not but
        ]

        assert 1 == len({(each.kind, str(each.value)) for each in outcomes})
        return outcomes[0]

    def push(self, version: int, **options: object) -> Outcome:
        """Push on all trainer ranks; return their one outcome."""
        self.begin(version, **options)
        return self.ended()

    def wait(self, *names: str) -> None:
        """Let some replicas, or all, wait for what ``received`` checks."""
        for rank in self.ranks(*names):
            ask(rank, "receive", timeout=SECONDS)

    def received(self, version: int, *names: str) -> None:
        """Some replicas, or all, get what they wait for; every byte is checked."""
        ranks = self.ranks(*names)
        received = [rank.hear() for rank in ranks]

        assert ["ok"] * len(ranks) == [each.kind for each in received], received
        assert {version} == {each.value.version for each in received}
        for rank in ranks:
            assert Held(version, version) == call(rank, "held").value

    def receive(self, version: int, *names: str) -> None:
        """Receive a version on all ranks of some replicas; every byte is checked."""
        self.wait(*names)
        self.received(version, *names)

    def deliver(self, version: int, *names: str) -> Outcome:
        """Push, and receive on some replicas meanwhile."""
        self.begin(version)
        self.receive(version, *names)
        return self.ended()

    def succeed(self, version: int, *dead: Child) -> Outcome:
        """Kill the trainers but for those dead; let others push to all replicas.

        Each replica has been told of that, and joins the others.
        """
        count = len(self.trainers)
        for trainer in self.trainers:
            if trainer not in dead:
                trainer.kill()
            trainer.join()
        self.wait()
        self.trainers = self._open_trainers(count)
        self.until_joined()
        self.begin(version)
        self.received(version)
        return self.ended()

    def descriptors(self, *children: Child) -> list[int]:
        """Count the open descriptors of trainer ranks, and of others given."""
        found = [call(child, "census") for child in (*self.trainers, *children)]
        return [each.value.descriptors for each in found]

    def forget(self, name: str) -> list[Child]:
        """Return the ranks of a replica that is out of the pool."""
        return self.replicas.pop(name)

    def close(self) -> float:
        """Close all that are left; return the seconds that it took."""
        return driven.close(*self.trainers, *self.ranks())
