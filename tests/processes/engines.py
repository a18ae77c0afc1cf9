"""The engines that tests run on: where the tensors are, and how ranks are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.processes.emulated import EmulatedProcesses
from tests.processes.harness import Processes
from tests.processes.rig import MODES
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.rig import Mode


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: the device of all tensors, and what starts the ranks."""

    name: str
    device: str
    processes: Callable[[], Processes]
    modes: tuple[Mode, ...] = MODES
    segments: int = 0
    """The most shared memory that a trainer rank without replicas maps."""


SHARED_MEMORY = Engine("shm", "cpu", Processes)
EMULATED_NCCL = Engine("nccl", "cuda", EmulatedProcesses, segments=5)
REAL_NCCL = Engine("gpu", "cuda", Processes)
"""For whole tests, on a machine with GPUs."""

ENGINES = {engine.name: engine for engine in (SHARED_MEMORY, EMULATED_NCCL)}

PARAMETERS = [
    "shm",
    pytest.param("nccl", marks=testing.requires_emulator()),
]
"""For whatever is to run on each of them."""

slow_on_nccl = pytest.mark.parametrize(
    "engine",
    [
        "shm",
        pytest.param("nccl", marks=[testing.requires_emulator(), pytest.mark.slow]),
    ],
    indirect=True,
)
"""Marks a test that runs on each of them, but on one only where time is short."""
