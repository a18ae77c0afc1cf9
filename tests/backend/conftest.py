"""Skips what needs the emulator where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(testing.requires_emulator())
