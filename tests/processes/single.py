"""A pool of one trainer rank and replicas of one rank, on emulated NCCL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from tests.processes import driven
from tests.processes.driven import MIB, Held, Outcome, ask, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Child, Control

NUMEL: Final = 40 * MIB
"""Five puts, and one of the header."""

TIMEOUT: Final = 3.0
GRACE: Final = 3.0
BLOCKING: Final = "NCCL_COMM_BLOCKING"
"""What windows of torch's own want to be 1."""

FAULTS: Final = {
    "a put is refused": ("put@n=3:fail=3", ""),
    "a put never ends": ("put@n=3:stall", ""),
    "a put through a network never ends": ("network=0-1; put@n=3:stall", "network=0-1"),
    "a wait is refused": ("", "wait@n=2:fail=3"),
    "a wait never ends": ("", "wait@n=2:stall"),
}
"""What goes wrong in a push, with the faults of the trainer and of the replica."""

EngineName: TypeAlias = Literal["nccl", "torch-nccl2"]


def _blocking(control: Control, function: Callable[..., Any], *args: object) -> Any:
    os.environ[BLOCKING] = "1"
    return function(control, *args)


class Pool:
    """One trainer rank, and replicas of one rank each."""

    def __init__(
        self, processes: EmulatedProcesses, address: str, engine: EngineName = "nccl"
    ) -> None:
        self._processes = processes
        self._address = address
        self._engine = engine
        self._count = 0

    def _start(self, name: str, faults: str, function: Any, *args: object) -> Child:
        self._processes.faults = faults
        child = self._processes.start(_blocking, function, *args, name=name)

        assert child.hear() == "open"
        return child

    def trainer(self, faults: str = "") -> Child:
        """Start the trainer rank."""
        place = (self._address, 0, 1, NUMEL, 10.0, "cuda")
        return self._start("trainer", faults, driven.trainer, *place)

    def generator(self, faults: str = "") -> Child:
        """Start one more replica."""
        name = f"gen-{self._count}"
        self._count += 1
        place = (self._address, name, 0, 1, NUMEL, "staged", 10.0, "cuda", None)
        return self._start(name, faults, driven.generator, *place, self._engine)


def joined(trainer: Child, count: int) -> None:
    """Wait until there are so many replicas."""
    assert call(trainer, "wait_for_replicas", count=count, timeout=15).kind == "ok"


def delivered(trainer: Child, generator: Child, version: int) -> Outcome:
    """Push; return the outcome, when that generator has what was pushed."""
    ask(generator, "receive", timeout=15)
    pushed = call(trainer, "push", version=version, timeout=TIMEOUT)
    received = generator.hear()

    assert ("ok", version) == (received.kind, received.value.version)
    assert Held(version, version) == call(generator, "held").value
    return pushed
