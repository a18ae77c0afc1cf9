"""A heartbeat in an event loop: how long did anything keep the loop from its tasks?"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import Generator

BEAT_SECONDS: Final = 0.005


class Heartbeat:
    """Wakes every 5 ms and keeps the longest interval between two wake-ups."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: float | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await anyio.sleep(BEAT_SECONDS)
            self._beat()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Let what happens inside count."""
        self._last = time.monotonic()
        try:
            yield
        finally:
            self._beat()
            self._last = None

    def _beat(self) -> None:
        if self._last is not None:
            now = time.monotonic()
            self.longest = max(self.longest, now - self._last)
            self._last = now
