"""Which version may be read and which slot may be written: a pure state machine.

A replica's memory is in an access epoch for readers or in an exposure epoch for puts,
never in both. How many slots there are and what a switch does is the mode's business.
Nothing here waits or locks; the caller does.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from weightsync.counting import Held
from weightsync.errors import EpochError


class Mode(Enum):
    """How a generator's tensors relate to its window; see docs/design.md."""

    STAGED = "staged"
    SWAP = "swap"
    INPLACE = "inplace"

    @property
    def slots(self) -> int:
        """Slots in the window."""
        return 2 if self is Mode.SWAP else 1


class Epochs:
    """The epochs of one generator rank.

    A slot goes from free to exposed (``expose``), to arrived (``arrive``) or back to
    free (``discard``), and is switched in (``begin_switch``, ``end_switch``) when no
    lease is held. ``epoch`` is that of the count of ``version``.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Final = mode
        self.version: int | None = None
        self.epoch = 0
        self.last: Held | None = None
        self.pending: int | None = None
        self.exposed: int | None = None
        self.leases = 0
        self.switching = False
        self.spoiled = False
        self._reading = 0

    def __repr__(self) -> str:
        """Show everything that decides."""
        return (
            f"<Epochs {self.mode.value}: version {self.version}, pending "
            f"{self.pending}, exposed {self.exposed}, {self.leases} leases"
            f"{', switching' if self.switching else ''}>"
        )

    @property
    def reading(self) -> int:
        """The slot that readers see (swap, inplace)."""
        return self._reading

    @property
    def free(self) -> int | None:
        """The slot that could be exposed now, if any."""
        if self.exposed is not None or self.pending is not None or self.switching:
            return None
        if self.mode is Mode.INPLACE:
            return 0 if self.leases == 0 else None
        return 0 if self.mode is Mode.STAGED else 1 - self._reading

    @property
    def readable(self) -> bool:
        """Whether a lease may be taken now."""
        return not self.switching and not self.unreadable

    @property
    def unreadable(self) -> bool:
        """Whether the tensors themselves are exposed, or hold no whole version."""
        arriving = self.exposed is not None or self.pending is not None
        return self.spoiled or (self.mode is Mode.INPLACE and arriving)

    def expose(self) -> int:
        """Open an exposure epoch on the free slot and return it."""
        slot = self.free
        if slot is None:
            raise EpochError(f"no slot is free to be exposed: {self!r}")
        self.exposed = slot
        return slot

    def arrive(self, version: int, epoch: int = 0) -> None:
        """End the exposure epoch: this version is whole in the slot."""
        if self.exposed is None:
            raise EpochError(f"version {version} arrived while nothing is exposed")
        arrived = Held(epoch, version)
        if self.last is not None and arrived <= self.last:
            raise EpochError(f"{arrived} arrived after {self.last}")
        self.exposed = None
        self.pending, self.last = version, arrived

    def conceal(self, *, written: bool) -> None:
        """End the exposure epoch without a version: what was put does not count.

        In place, memory that was ``written`` has lost the old version: there is none
        until the next one is whole.
        """
        if self.exposed is None:
            raise EpochError(f"nothing is exposed: {self!r}")
        self.exposed = None
        if written and self.mode is Mode.INPLACE:
            self.spoiled, self.version = True, None

    def begin_switch(self) -> int:
        """Start to make the pending version the readable one; return its slot."""
        if self.pending is None or self.leases or self.switching:
            raise EpochError(f"cannot switch now: {self!r}")
        self.switching = True
        return 1 - self._reading if self.mode is Mode.SWAP else 0

    def end_switch(self, *, whole: bool = True) -> int:
        """Finish it; return the version that arrived.

        It is not ``whole`` where a partial push left memory as it was that a push
        before, which was given up, had spoiled: then nothing can be read yet.
        """
        if not self.switching or self.pending is None:
            raise EpochError(f"no switch is under way: {self!r}")
        if self.mode is Mode.SWAP:
            self._reading = 1 - self._reading
        arrived, self.pending = self.pending, None
        self.switching, self.spoiled = False, not whole
        self.version = arrived if whole else None
        self.epoch = self.epoch if self.last is None else self.last.epoch
        return arrived

    def fail_switch(self) -> None:
        """Give the switch up half way: the tensors hold no whole version any more.

        What was pending is lost with the link that it came over.
        """
        self.switching, self.spoiled = False, True
        self.version = self.pending = None

    def begin_move(self) -> bool:
        """Start to move the tensors into other memory; False while they are read."""
        if self.leases or self.switching or self.pending is not None:
            return False
        self.switching = True
        return True

    def end_move(self, *, moved: bool) -> None:
        """They live in the first slot of a new window now, or where they were."""
        self.switching = False
        if moved:
            self._reading = 0

    def acquire(self) -> int | None:
        """Take a read lease on the version that is returned."""
        if not self.readable:
            raise EpochError(f"the weights cannot be read now: {self!r}")
        self.leases += 1
        return self.version

    def release(self) -> None:
        """Give a read lease back."""
        if self.leases == 0:
            raise EpochError("there is no lease to give back")
        self.leases -= 1
