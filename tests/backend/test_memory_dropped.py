"""Dropping memory of NCCL where the device never has done what it was given."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.windows import OURS, mine
from tests.conformance.group import job
from weightsync import testing
from weightsync.window import Window

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def _drops() -> tuple[float, float, int]:
    """Seconds until one is dropped, and then others; bytes that are free since."""
    with job(OURS) as device:
        group: Any = dist.group.WORLD
        window = Window(group, Window.allocate(group, 64, device=device))
        memory = [Window.allocate(group, 64, device=device) for _ in range(6)]
        torch.cuda.synchronize(device)
        window.put(window.local[:8], 0)
        started, before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        del memory[-1]
        first = time.monotonic() - started
        memory.clear()
        others = time.monotonic() - started - first
        freed = torch.cuda.mem_get_info(device)[0] - before
        mine(device).abort()
        return first, others, freed


def test_only_the_first_of_many_waits_for_a_device_that_never_ends() -> None:
    faults = "put@n=1:stall; set-apart"
    first, others, freed = testing.emulated(_drops, 1, faults=faults, hang_seconds=0)[0]

    assert 4 < first < 20
    assert 1 > others
    assert 0 == freed


def _recovers() -> tuple[float, int]:
    """Seconds to drop six, and bytes that are free again when the device is idle."""
    with job(OURS) as device:
        group: Any = dist.group.WORLD
        window = Window(group, Window.allocate(group, 64, device=device))
        memory = [Window.allocate(group, 64, device=device) for _ in range(6)]
        torch.cuda.synchronize(device)
        operation = window.put(window.local[:8], 0)
        started, before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        memory.clear()
        seconds = time.monotonic() - started
        operation.wait(20)
        while torch.cuda.mem_get_info(device)[0] < before + (6 * 2 << 20):
            time.sleep(0.01)  # until a thread of the core has freed it
        return seconds, torch.cuda.mem_get_info(device)[0] - before


def test_what_was_dropped_is_freed_when_the_device_has_recovered() -> None:
    seconds, freed = testing.emulated(_recovers, 1, faults="put@n=1:delay=7")[0]

    assert seconds < 12
    assert 6 * 2 << 20 == freed
