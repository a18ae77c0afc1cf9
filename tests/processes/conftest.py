"""Fixtures for tests with real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.harness import Processes, free_address

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Start children; what is left at the end of the test is killed."""
    found = Processes()
    yield found
    found.end()


@pytest.fixture
def address() -> str:
    """An address for a store that nobody uses yet."""
    return free_address()
