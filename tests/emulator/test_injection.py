"""Faults that a process injects while it runs."""

from __future__ import annotations

import pytest

from weightsync import testing
from weightsync.errors import UnsupportedError


def copies() -> list[str]:
    """Copy five times to a GPU; return what CUDA said to each."""
    import torch

    found = []
    place = torch.empty(4, device="cuda")
    torch.zeros(4, device="cpu").to("cuda")
    testing.inject("cudaMemcpyAsync@n=2:fail=719")
    for attempt in range(4):
        if attempt == 3:
            testing.inject("cudaMemcpyAsync@n=1:fail=719")
            testing.inject("")
        try:
            place.copy_(torch.ones(4))
            found.append("")
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


@testing.requires_emulator()
def test_a_function_fails_from_where_its_fault_is_injected() -> None:
    ((first, second, third, last),) = testing.emulated(copies, 1)

    assert ["", "", ""] == [first, third, last]
    assert "unspecified launch failure" in second
    assert "cudaMemcpyAsync: as a fault asks" in second


def refusals() -> list[str]:
    found = []
    for text in ("cudaMemcpyAsync:stall", "nccl=2.31.2"):
        try:
            testing.inject(text)
        except ValueError as error:
            found.append(str(error))
    return found


@testing.requires_emulator()
def test_what_cannot_be_injected_is_told() -> None:
    ((stall, setting),) = testing.emulated(refusals, 1)

    assert "stall needs an operation" in stall
    assert "is set before it begins" in setting


def test_without_the_emulator_nothing_is_injected() -> None:
    with pytest.raises(UnsupportedError, match="on the emulator only"):
        testing.inject("")
