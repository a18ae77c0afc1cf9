"""The functional collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.conformance.calls import Call, perform, promised
from tests.conformance.functional import FUNCTIONAL
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

# A process takes seconds to make its first functional call, so there is one job.
WORLD: Final = 2


def test_functional_collectives_return_new_tensors(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [
        Call(each, dtype) for each in FUNCTIONAL for dtype in ("bfloat16", "int64")
    ]
    calls += [Call(each, "float32", "max") for each in FUNCTIONAL if "reduce" in each]

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(
        perform, WORLD, args=[backend, calls], faults="*:delay=0.002"
    )

    assert {} == deviations(expected, found)
