"""Runs each test of the suite for every backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance import backends
from tests.conformance.backends import BACKENDS, FAULTS, LACKING, TORCH, Fault
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill the parameter ``backend``, with those that have what the module NEEDS."""
    if "backend" in metafunc.fixturenames:
        needed = getattr(metafunc.module, "NEEDS", None)
        able = [each for each in BACKENDS if needed not in LACKING.get(each, ())]
        metafunc.parametrize("backend", able)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Expect the known faults, and skip where there is no emulator."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(testing.requires_emulator())
        for fault in FAULTS:
            if not fault.cases and _meets(item, fault):
                item.add_marker(pytest.mark.xfail(reason=fault.reason, strict=True))


@pytest.fixture
def deviations(request: pytest.FixtureRequest) -> Callable[..., dict[str, str]]:
    """Return ``backends.deviations`` with the faults of this test and backend."""
    known = [fault for fault in FAULTS if fault.cases and _meets(request.node, fault)]
    return partial(backends.deviations, known)


def _meets(item: pytest.Item, fault: Fault) -> bool:
    assert isinstance(item, pytest.Function)
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    identifiers = item.name.removeprefix(item.originalname).strip("[]")
    others = f"-{identifiers}-".replace(f"-{backend}-", "-").strip("-")
    names = {item.originalname, f"{item.originalname}[{others}]"}
    return fault.backend == backend and TORCH in fault.torch and fault.test in names
