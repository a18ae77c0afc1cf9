"""Engine "nccl" when NCCL fails, stalls or dies at any call: others never notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, Outcome, ask, call
from tests.processes.emulated import EmulatedProcesses
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes.harness import Child

pytestmark = testing.requires_emulator()

NUMEL = 40 * MIB
"""Five puts, and one of the header."""

TIMEOUT = 3.0
GRACE = 3.0


@pytest.fixture
def processes() -> Iterator[EmulatedProcesses]:
    found = EmulatedProcesses()
    yield found
    found.end()


class Pool:
    """One trainer rank, and replicas of one rank each."""

    def __init__(self, processes: EmulatedProcesses, address: str) -> None:
        self._processes = processes
        self._address = address
        self._count = 0

    def trainer(self, faults: str = "") -> Child:
        """Start the trainer rank."""
        self._processes.faults = faults
        arguments = (self._address, 0, 1, NUMEL, 10.0, "cuda")
        child = self._processes.start(driven.trainer, *arguments, name="trainer")

        assert child.hear() == "open"
        return child

    def generator(self, faults: str = "") -> Child:
        """Start one more replica."""
        self._processes.faults = faults
        name = f"gen-{self._count}"
        self._count += 1
        arguments = (self._address, name, 0, 1, NUMEL, "staged", 10.0, "cuda")
        child = self._processes.start(driven.generator, *arguments, name=name)

        assert child.hear() == "open"
        return child


def joined(trainer: Child, count: int) -> None:
    assert call(trainer, "wait_for_replicas", count=count, timeout=15).kind == "ok"


def delivered(trainer: Child, generator: Child, version: int) -> Outcome:
    """Push; return the outcome, when that generator has what was pushed."""
    ask(generator, "receive", timeout=15)
    pushed = call(trainer, "push", version=version, timeout=TIMEOUT)
    received = generator.hear()

    assert ("ok", version) == (received.kind, received.value.version)
    assert Held(version, version) == call(generator, "held").value
    return pushed


@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_trainer_that_dies_at_any_put_leaves_the_old_version(
    number: int, processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer = pool.trainer(f"put@n={number}:kill")
    generator = pool.generator()
    joined(trainer, 1)
    ask(generator, "receive", timeout=15)
    ask(trainer, "push", version=1, timeout=TIMEOUT)
    trainer.join()
    received = generator.hear()

    idle = call(generator, "synchronize")

    assert "PeerError" == received.kind, received
    assert "trainer" in received.value
    assert idle.seconds < 2
    assert Held(None, SENTINEL) == call(generator, "held").value
    assert driven.close(generator) < 5


FAULTS = {
    "a put is refused": ("put@n=3:fail=3", ""),
    "a put never ends": ("put@n=3:stall", ""),
    "a put through a network never ends": ("network=0-1; put@n=3:stall", "network=0-1"),
    "a wait is refused": ("", "wait@n=2:fail=3"),
    "a wait never ends": ("", "wait@n=2:stall"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_push_that_nccl_fails_ends_in_time_and_for_its_replica_only(
    case: str, processes: EmulatedProcesses, address: str
) -> None:
    sending, receiving = FAULTS[case]
    pool = Pool(processes, address)
    trainer = pool.trainer(sending)
    broken = pool.generator(receiving)
    joined(trainer, 1)
    ask(broken, "receive", timeout=15)
    failed = call(trainer, "push", version=1, timeout=TIMEOUT)
    received = broken.hear()
    held = call(broken, "held").value
    healthy = pool.generator()
    joined(trainer, 1)
    pushed = delivered(trainer, healthy, 2)

    assert failed.kind in {"PeerError", "TimedOutError", "WeightSyncError"}, failed
    assert "gen-0" in failed.value
    assert failed.seconds < TIMEOUT + GRACE
    assert "ok" != received.kind
    assert Held(None, SENTINEL) == held
    assert (("gen-1",), {}) == (pushed.value.delivered, pushed.value.failed)
    assert driven.close(healthy) < 5
    assert driven.close(broken, trainer) < 10


LINKS = {
    "no window is registered": "window_register@n=1:fail=3",
    "no memory for the window of the signals": "mem_alloc@n=2:fail=2",
}


@pytest.mark.parametrize("case", LINKS)
def test_a_link_that_cannot_be_formed_concerns_no_other(
    case: str, processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer, healthy = pool.trainer(), pool.generator()
    joined(trainer, 1)
    broken = pool.generator(LINKS[case])
    received = call(broken, "receive", timeout=15)
    pushed = delivered(trainer, healthy, 1)

    assert "PeerError" == received.kind, received
    assert "removed from the pool" in received.value
    assert ("gen-0",) == pushed.value.delivered
    assert driven.close(healthy, broken, trainer) < 10


def test_where_nccl_makes_no_windows_the_replica_is_told_why(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer, generator = pool.trainer("no-symmetric"), pool.generator("no-symmetric")
    received = call(generator, "receive", timeout=15)

    assert "PeerError" == received.kind, received
    assert "window" in received.value
    assert driven.close(generator, trainer) < 10


def test_a_replica_behind_a_network_that_dies_in_a_push_fails_alone(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer, dies = pool.trainer("network=0-1"), pool.generator("network=0-1")
    joined(trainer, 1)
    watch = pool.generator()
    joined(trainer, 2)
    call(dies, "kill_at_first_byte", pid=dies.pid, number=9)
    pushed = delivered(trainer, watch, 1)
    again = delivered(trainer, watch, 2)

    assert ("gen-1",) == pushed.value.delivered
    assert {"gen-0"} == set(pushed.value.failed)
    assert ("gen-1",) == again.value.delivered
    assert driven.close(watch, trainer) < 10


@pytest.mark.parametrize("nccl", ["2.30.7", "2.31.2"])
def test_it_works_with_every_nccl(
    nccl: str, processes: EmulatedProcesses, address: str
) -> None:
    processes.nccl = nccl
    pool = Pool(processes, address)
    trainer, generator = pool.trainer(), pool.generator()
    joined(trainer, 1)
    for version in (1, 2, 3):
        pushed = delivered(trainer, generator, version)

        assert ("gen-0",) == pushed.value.delivered
    assert driven.close(generator, trainer) < 5
