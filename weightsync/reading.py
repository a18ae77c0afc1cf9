"""The epochs of a generator rank, between its loop and the threads that read weights.

They outlive what the rank is a member of: a version that it has received stays readable
while its trainers are gone, and whoever holds a lease may give it back later.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio

from weightsync.epoch import Epochs, Mode
from weightsync.errors import EpochError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

POLITE_SECONDS: Final = 5.0
"""How long a new lease lets a switch go first, which may wait for its own caller."""


class Reading:
    """``lock`` guards ``epochs``; leases are taken and given back by any thread.

    ``torn`` are the memories, as indices of pieces, that hold no whole version.
    ``note`` lets what a thread gave the device to do come before a switch.
    """

    def __init__(self, mode: Mode, note: Callable[[], None]) -> None:
        self.note: Final = note
        self.epochs: Final = Epochs(mode)
        self.lock: Final = threading.Condition()
        self.torn: frozenset[int] = frozenset()
        self._changed = anyio.Event()
        self._switch_wanted = False

    # In the loop

    def notify(self) -> None:
        """Something changed: let whoever waits in the loop look again."""
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def change(self) -> anyio.Event:
        """Set when something changes after this look."""
        return self._changed

    def begin_switch(self) -> bool:
        """Begin to switch in what is pending; False while a lease is held."""
        with self.lock:
            if self.epochs.pending is None:
                return False
            if self.epochs.leases:
                self._switch_wanted = True
                return False
            self.epochs.begin_switch()
            return True

    def fail_switch(self) -> None:
        """Give a switch up half way."""
        with self.lock:
            self.epochs.fail_switch()
            self.lock.notify_all()

    def end_switch(self) -> int:
        """Finish a switch; return the version that arrived."""
        with self.lock:
            version = self.epochs.end_switch(whole=not self.torn)
            self.lock.notify_all()
        self.notify()
        return version

    def want_no_switch(self) -> None:
        """Nobody waits for leases to end."""
        with self.lock:
            self._switch_wanted = False
            self.lock.notify_all()
        self.notify()

    def conceal(self, *, written: bool) -> None:
        """End the exposure epoch, if there is one, without a version."""
        with self.lock:
            if self.epochs.exposed is not None:
                self.epochs.conceal(written=written)
            self.lock.notify_all()
        self.notify()

    async def unread(self) -> None:
        """Begin to move the tensors into other memory, when no lease is held."""
        try:
            while not self._begin_move():
                await self._changed.wait()
        finally:
            self.want_no_switch()

    def _begin_move(self) -> bool:
        with self.lock:
            self._switch_wanted = True
            return self.epochs.begin_move()

    @contextmanager
    def moving(self) -> Generator[None]:
        """Move the tensors, after ``unread``."""
        moved = False
        try:
            yield
            moved = True
        finally:
            with self.lock:
                self.epochs.end_move(moved=moved)
                self.lock.notify_all()
            self.notify()

    async def wait_for_switch(self) -> None:
        """Let a switch go first."""
        with anyio.move_on_after(POLITE_SECONDS):
            while self.lease_waits:
                await self._changed.wait()

    # From any thread

    @property
    def lease_waits(self) -> bool:
        """Whether a polite lease would wait now."""
        return self.epochs.switching or self._switch_wanted

    def acquire(self, *, polite: bool) -> tuple[int | None, int]:
        """Take a read lease on a version and its epoch; wait during a switch.

        ``polite`` callers also let a version go first that waits for leases to end.
        """
        with self.lock:
            if polite:
                self.lock.wait_for(lambda: not self._switch_wanted, POLITE_SECONDS)
            self.lock.wait_for(lambda: not self.epochs.switching)
            if self.epochs.unreadable:
                message = (
                    "in mode 'inplace' the weights cannot be read until receive() "
                    "has returned a whole version"
                )
                raise EpochError(message)
            return self.epochs.acquire(), self.epochs.epoch

    def release(self) -> bool:
        """Give a lease back; True if it was the last."""
        self.note()
        with self.lock:
            self.epochs.release()
            return self.epochs.leases == 0
