"""Windows on NCCL: what was issued reads its tensors, though the call failed then."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest
import torch

from tests.backend.windows import NCCLS, OURS, mine, octet_range, opened, table
from tests.conformance.group import error_of, job
from tests.conformance.values import octets
from tests.emulator.leftovers import eventually
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

LATER: Final = "put@n=1:delay=0.7"
"""When what is issued after it is still to come, whatever the load."""


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def _a_put_whose_end_cannot_be_marked() -> list[Any]:
    with job(OURS) as device:
        memory, tensor, window = opened(device, octet_range(0, 64))
        torch.cuda.synchronize(device)
        before = allocated(device)
        sources = [memory.holding(octet_range(100, 64))]
        testing.inject(f"{LATER}; cudaEventRecordWithFlags@n=2:fail=999")
        error = error_of(lambda: window.put(sources[0], 0, 0, True))
        testing.inject("")
        sources.clear()
        other = memory.holding(octet_range(7, 64))  # where the source was, if it went
        torch.cuda.synchronize(device)
        del other
        arrived, kept = octets(tensor), allocated(device) > before
        mine(device).abort()
        freed = eventually(lambda: allocated(device) <= before)
        return [error, arrived, kept, freed]


@pytest.mark.parametrize("nccl", NCCLS)
def test_a_put_reads_its_source_to_the_end_though_its_own_end_cannot_be_marked(
    nccl: str,
) -> None:
    (found,) = testing.emulated(_a_put_whose_end_cannot_be_marked, 1, nccl=nccl)
    error, arrived, kept, freed = found

    assert "cudaEventRecord" in error
    assert octets(octet_range(100, 64)) == arrived
    assert kept
    assert freed


def _the_second_of_two_copies_fails() -> list[Any]:
    with job(OURS) as device:
        memory, tensor, window = opened(device, octet_range(0, 64))
        slow = memory.holding(octet_range(40, 8))
        torch.cuda.synchronize(device)
        before = allocated(device)
        sources = [octet_range(100, 16).to(device)]
        runs = table([0, 0, 0, 1, 8, 0, 0], [0, 8, 16, 1, 8, 0, 0])
        testing.inject(f"{LATER}; cudaMemcpyAsync@n=2:fail=999")
        window.put(slow, 0, 32, True)
        error = error_of(partial(window.copy_local, sources, runs, True, True))
        testing.inject("")
        sources.clear()
        other = octet_range(7, 16).to(device)  # where the source was, if it went
        torch.cuda.synchronize(device)
        del other
        freed = eventually(lambda: allocated(device) <= before)
        return [error, octets(tensor[:24]), freed]


@pytest.mark.parametrize("nccl", NCCLS)
def test_what_a_call_issued_before_it_failed_reads_its_tensors_to_the_end(
    nccl: str,
) -> None:
    ((error, arrived, freed),) = testing.emulated(
        _the_second_of_two_copies_fails, 1, nccl=nccl
    )
    expected = octet_range(0, 24)
    expected[:8] = octet_range(100, 8)

    assert "cudaMemcpyAsync" in error
    assert octets(expected) == arrived
    assert freed
