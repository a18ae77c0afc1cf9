"""Several operations as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.calls import Call, perform, promised
from tests.conformance.coalesced import COALESCED, LISTS
from tests.conformance.group import Answer, Refused, answer, job, rank
from tests.conformance.values import octets
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD: Final = 3

LATE: Final = "*:delay=0.002"
"""Every operation of NCCL takes longer than it takes to look at its result."""


def test_a_batch_does_what_its_operations_do(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [
        Call(operation, dtype, form=form)
        for operation in COALESCED
        for form in ("sync", "wait")
        for dtype in ("uint8", "bfloat16", "float32", "bool")
    ]

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls], faults=LATE)

    assert {} == deviations(expected, found)


@pytest.mark.parametrize("operation", LISTS)
def test_many_tensors_of_each_rank_are_gathered(
    backend: str, operation: str, deviations: Callable[..., Any]
) -> None:
    calls = [Call(operation, form=form) for form in ("sync", "wait")]

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls], faults=LATE)

    assert {} == deviations(expected, found)


def mixed(backend: str) -> dict[str, Answer]:
    with job(backend) as device:
        tensor = torch.tensor([1 + rank(), 10]).to(device)

        def mix() -> None:
            with dist._coalescing_manager():
                dist.all_reduce(tensor)
                dist.all_gather_into_tensor(torch.empty_like(tensor).repeat(1), tensor)

        def nothing() -> None:
            with dist._coalescing_manager():
                pass

        found = {"mixed": answer(mix), "nothing": answer(nothing, [tensor])}
        return {
            **found,
            "afterwards": answer(lambda: dist.all_reduce(tensor), [tensor]),
        }


def test_operations_of_different_kinds_are_no_batch(backend: str) -> None:
    found = testing.emulated(mixed, 2, args=[backend])

    expected = [
        {
            "mixed": Refused(("same type",)),
            "nothing": octets(torch.tensor([1 + each, 10])),
            "afterwards": octets(torch.tensor([3, 20])),
        }
        for each in range(2)
    ]
    assert expected == found
