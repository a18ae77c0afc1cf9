"""The marker of tests that need the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.testing.environment import available, reason

if TYPE_CHECKING:
    import pytest


def requires_emulator() -> pytest.MarkDecorator:
    """Mark a test, a class or a module that is skipped where there is no emulator.

    ``@requires_emulator()``, or ``pytestmark = requires_emulator()``.
    """
    import pytest

    return pytest.mark.skipif(not available(), reason=reason())
