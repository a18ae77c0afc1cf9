"""Every collective with every dtype, and every reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.conformance.calls import Call, perform, promised, refused_last
from tests.conformance.operations import MOVES, REDUCTIONS
from tests.conformance.values import MOVED, name
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD: Final = 3

OPS: Final = (
    "sum",
    "product",
    "min",
    "max",
    "avg",
    "premul_sum",
    "band",
    "bor",
    "bxor",
)


@pytest.mark.parametrize("operation", MOVES)
def test_every_dtype_is_moved_bit_by_bit(
    backend: str, operation: str, deviations: Callable[..., Any]
) -> None:
    calls = [Call(operation, name(dtype)) for dtype in MOVED]

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls])

    assert {} == deviations(expected, found)


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_every_dtype_is_reduced_by_every_reduction_that_nccl_has_for_it(
    backend: str, operation: str, deviations: Callable[..., Any]
) -> None:
    every = [Call(operation, name(dtype), op) for op in OPS for dtype in MOVED]
    calls = refused_last(every, backend)

    expected = [promised(calls, WORLD, each, backend) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls])

    assert {} == deviations(expected, found)
