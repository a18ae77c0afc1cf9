"""What c10d does not promise is refused, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.calls import Call, make, perform, promised
from tests.conformance.group import Answer, Refused, answer, job
from tests.conformance.operations import OPERATIONS
from tests.conformance.values import UNMAPPED, name
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD: Final = 2


# An error inside of torch's coalescing manager leaves that open in every backend.
OTHERS: Final = ("managed all_gather", "chain", "ring")


@pytest.mark.parametrize("operation", [*OPERATIONS, *OTHERS])
def test_dtypes_that_nccl_has_not_are_refused_and_the_group_stays_usable(
    backend: str, operation: str, deviations: Callable[..., Any]
) -> None:
    calls = [Call(operation, name(dtype)) for dtype in UNMAPPED]
    calls.append(Call("all_reduce", "int64"))

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls])

    assert {} == deviations(expected, found)


def unsuited(backend: str) -> dict[str, Answer]:
    with job(backend) as device:
        tensor = torch.arange(6.0).to(device)
        square = torch.arange(4.0).to(device).reshape(2, 2).t()
        calls: dict[str, Callable[[], object]] = {
            "not contiguous": lambda: dist.all_reduce(square),
            "not contiguous list": lambda: dist.all_gather([square, square], square),
            "on the host": lambda: dist.all_reduce(tensor.cpu()),
            "of another size": lambda: dist.all_gather_single(tensor[:5], tensor[:3]),
            "of another dtype": lambda: dist.all_gather_single(
                tensor, tensor[:3].view(torch.int32)
            ),
            "too few outputs": lambda: dist.all_gather([tensor], tensor),
            "splits that do not add up": lambda: dist.all_to_all_single(
                torch.empty_like(tensor), tensor, [3, 2], [3, 3]
            ),
            "a root that is not": lambda: dist.broadcast(tensor, 2),
        }
        found = {case: answer(call) for case, call in calls.items()}
        call = Call("all_reduce")
        return {**found, call.label: make(call, device)}


def test_tensors_that_cannot_be_are_refused_and_the_group_stays_usable(
    backend: str, deviations: Callable[..., Any]
) -> None:
    found = testing.emulated(unsuited, WORLD, args=[backend])

    refused = {
        "not contiguous": Refused(("contiguous",)),
        "not contiguous list": Refused(("contiguous",)),
        "on the host": Refused(("cpu", "cuda")),
        "of another size": Refused(("size",)),
        "of another dtype": Refused(("type",)),
        "too few outputs": Refused(("size", "length", "number", "output")),
        "splits that do not add up": Refused(("split",)),
        "a root that is not": Refused(("rank", "root", "invalid argument")),
    }
    usable = [promised([Call("all_reduce")], WORLD, each) for each in range(WORLD)]
    assert {} == deviations([{**refused, **each} for each in usable], found)
