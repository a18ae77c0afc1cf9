"""A pool of real processes: several trainer ranks, and replicas of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.processes import driven
from tests.processes.driven import Held, Outcome, ask, call

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes

SECONDS = 20.0
"""Timeout of what is not expected to time out."""


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
        self._address = address
        self._numel = numel
        self._lease = lease
        arguments = (trainers, numel, lease)
        self.trainers = [
            processes.start(driven.trainer, address, rank, *arguments, name=f"T{rank}")
            for rank in range(trainers)
        ]
        for trainer in self.trainers:
            assert "open" == trainer.hear()

    def start(self, name: str, *, ranks: int = 1, mode: str = "staged") -> list[Child]:
        """Start the ranks of a replica, each of which holds all of ``w``."""
        self.replicas[name] = [
            self._start(
                driven.generator,
                *(self._address, name, rank, ranks, self._numel, mode, self._lease),
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
        for trainer in self.trainers:
            joined = call(trainer, "wait_for_replicas", count=len(self.replicas))
            assert "ok" == joined.kind
        return found

    def begin(self, version: int, **options: object) -> None:
        """Start a push on all trainer ranks."""
        for trainer in self.trainers:
            ask(trainer, "push", version=version, **{"timeout": SECONDS, **options})

    def ended(self, *, but: Child | None = None) -> Outcome:
        """Return the outcome of a push, which is one on all trainer ranks."""
        outcomes = [trainer.hear() for trainer in self.trainers if trainer is not but]

        assert 1 == len({(each.kind, str(each.value)) for each in outcomes})
        return outcomes[0]

    def push(self, version: int, **options: object) -> Outcome:
        """Push on all trainer ranks; return their one outcome."""
        self.begin(version, **options)
        return self.ended()

    def receive(self, version: int, *names: str) -> None:
        """Receive a version on all ranks of some replicas; every byte is checked."""
        ranks = [rank for name in names for rank in self.replicas[name]]
        for rank in ranks:
            ask(rank, "receive", timeout=SECONDS)
        received = [rank.hear() for rank in ranks]

        assert ["ok"] * len(ranks) == [each.kind for each in received], received
        assert {version} == {each.value.version for each in received}
        for rank in ranks:
            assert Held(version, version) == call(rank, "held").value

    def deliver(self, version: int, *names: str) -> Outcome:
        """Push, and receive on some replicas meanwhile."""
        self.begin(version)
        self.receive(version, *names)
        return self.ended()

    def leave(self, name: str) -> None:
        """All ranks of a replica close."""
        driven.close(*self.replicas.pop(name))

    def forget(self, name: str) -> list[Child]:
        """A replica is out; return its ranks."""
        return self.replicas.pop(name)

    def close(self) -> float:
        """Close everybody who is left; return the seconds of the slowest."""
        ranks = [rank for ranks in self.replicas.values() for rank in ranks]
        return driven.close(*self.trainers, *ranks)
