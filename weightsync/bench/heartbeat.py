"""A heartbeat in an event loop: how long did anything keep the loop from its tasks?"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import Generator

BEAT_SECONDS: Final = 0.005


class Heartbeat:
    """Wakes every 5 ms and keeps the longest interval between two wake-ups.

    Beside it, the longest pause of Python's garbage collector, which stops every
    thread: a full collection of a process that has imported torch takes 0.1 s.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.collector = 0.0
        self._last: float | None = None
        self._collecting = 0.0

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await anyio.sleep(BEAT_SECONDS)
            self._beat()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Let what happens inside count."""
        self._last = time.monotonic()
        gc.callbacks.append(self._collector)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collector)
            self._beat()
            self._last = None

    def _beat(self) -> None:
        if self._last is not None:
            now = time.monotonic()
            self.longest = max(self.longest, now - self._last)
            self._last = now

    def _collector(self, phase: str, _: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting = now
        elif self._collecting:
            self.collector = max(self.collector, now - self._collecting)
            self._collecting = 0.0
