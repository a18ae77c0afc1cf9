"""Somebody is killed in the middle of a replay: the others end, or go on undelayed."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, Held, ask, call
from tests.processes.engines import slow_on_nccl

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes

NUMEL = {"shm": 128 * MIB, "nccl": 48 * MIB}
"""Enough for a kill at the first byte to come before the last."""


class Pool:
    """Two trainer ranks that keep version 1, which ``old`` holds."""

    def __init__(self, processes: Processes, address: str, engine: Engine) -> None:
        self._processes = processes
        self._address = address
        self._numel = NUMEL[engine.name]
        self._device = engine.device
        arguments = (2, self._numel, 10.0, self._device, True)
        self.trainers = [
            processes.start(driven.trainer, address, rank, *arguments)
            for rank in range(2)
        ]
        self.old = self.join("old", "staged")
        for child in (*self.trainers, self.old):
            assert child.hear() == "open"
        for trainer in self.trainers:
            assert call(trainer, "wait_for_replicas", count=1).kind == "ok"
        self.push(1)

    def join(self, name: str, mode: str) -> Child:
        arguments = (self._address, name, 0, 1, self._numel, mode, 10.0, self._device)
        return self._processes.start(driven.generator, *arguments)

    def push(self, version: int) -> list[driven.Outcome]:
        ask(self.old, "receive", timeout=20)
        for trainer in self.trainers:
            ask(trainer, "push", version=version, timeout=20)
        outcomes = [trainer.hear() for trainer in self.trainers]
        assert self.old.hear().kind == "ok"
        return outcomes

    def strike(self, late: Child, victim: Child) -> None:
        """Kill at the first byte of the replay to a replica that has just come."""
        assert late.hear() == "open"
        call(late, "kill_at_first_byte", pid=victim.pid, number=signal.SIGKILL)
        ask(late, "receive", timeout=20)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_is_killed_in_a_replay_leaves_whole_versions(
    rank: int, processes: Processes, address: str, engine: Engine
) -> None:
    pool = Pool(processes, address, engine)
    late = pool.join("late", "inplace")
    pool.strike(late, pool.trainers[rank])
    received = late.hear()
    other = call(pool.trainers[1 - rank], "push", version=2, timeout=5)
    held = call(late, "held").value

    assert received.kind in {"ok", "PeerError"}
    assert (received.kind == "ok") == (held == Held(1, 1))
    assert "PeerError" == other.kind
    assert Held(1, 1) == call(pool.old, "held").value
    assert held.version in {None, 1}


@slow_on_nccl
def test_a_replica_that_is_killed_in_its_replay_delays_nobody(
    processes: Processes, address: str, engine: Engine
) -> None:
    before = driven.in_shared_memory()
    pool = Pool(processes, address, engine)
    late = pool.join("late", "inplace")
    pool.strike(late, late)
    started = time.monotonic()
    outcomes = pool.push(2)
    seconds = time.monotonic() - started
    again = pool.join("late", "staged")
    assert again.hear() == "open"
    received = call(again, "receive", timeout=20)
    held = call(again, "held").value
    driven.close(again, pool.old, *pool.trainers)

    assert {"ok"} == {outcome.kind for outcome in outcomes}
    assert {"delivered"} == {
        outcome.value.replicas["old"].status for outcome in outcomes
    }
    assert seconds < 3.0
    assert ("ok", 2) == (received.kind, received.value.version)
    assert Held(2, 2) == held
    assert before == driven.in_shared_memory()


@slow_on_nccl
def test_a_push_in_the_middle_of_a_replay_goes_before_it(
    processes: Processes, address: str, engine: Engine
) -> None:
    pool = Pool(processes, address, engine)
    versions: list[list[int]] = []
    for number in range(3):
        late = pool.join(f"late-{number}", "staged")
        assert late.hear() == "open"
        ask(late, "receive", timeout=20)
        outcomes = pool.push(2 + number)
        seen = [late.hear().value.version]
        while seen[-1] < 2 + number:
            seen.append(call(late, "receive", timeout=20).value.version)
        held = call(late, "held").value
        driven.close(late)
        versions.append(seen)

        assert {"ok"} == {outcome.kind for outcome in outcomes}
        assert Held(2 + number, 2 + number) == held

    for number, seen in enumerate(versions):
        assert seen in ([2 + number], [1 + number, 2 + number])
