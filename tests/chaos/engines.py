"""What the chaos suite runs on: where the memory is, and how processes are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.processes.harness import Processes

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: the device of all tensors, and what starts the ranks."""

    name: str
    device: str
    processes: Callable[[], Processes]


SHARED_MEMORY = Engine("shm", "cpu", Processes)

ENGINES = {engine.name: engine for engine in (SHARED_MEMORY,)}
