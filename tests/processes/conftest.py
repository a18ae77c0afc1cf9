"""Fixtures for tests with real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.engines import ENGINES, PARAMETERS, Engine
from tests.processes.harness import Processes, free_address

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=PARAMETERS)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Run on each engine; ``processes`` are then on it."""
    return ENGINES[request.param]


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Start children; what is left at the end of the test is killed."""
    found = Processes()
    if "engine" in request.fixturenames:
        found = request.getfixturevalue("engine").processes()
    yield found
    found.end()


@pytest.fixture
def address() -> str:
    """An address for a store that nobody uses yet."""
    return free_address()
