"""Leases of channels: when to give a sign of life, and when a peer gave none."""

from __future__ import annotations

from typing import Final

from weightsync.errors import PlanError

DEFAULT_LEASE: Final = 10.0
"""Seconds without a sign of life after which a peer is dropped, where none are given.

Longer than a program keeps all its threads from running, as while it compiles a model.
"""

SHORTEST_LEASE: Final = 0.2
"""A busy machine lets a process wait for a part of this."""

LONGEST_LEASE: Final = 86_400.0

BEATS: Final = 4
"""So many signs of life are due in one lease."""


class Vigil:
    """What one side of a channel knows of the other's signs of life, and of its own.

    All times are of one clock. Only silence counts through which this side was awake:
    between two looks at most half a lease. Whoever was stopped itself finds at first
    what its peers said before, and must read on before it judges them.
    """

    def __init__(self, lease: float, now: float) -> None:
        self.lease: Final = lease
        self.silent = 0.0
        self._heard = now
        self._looked = now
        self._sent = now

    def __repr__(self) -> str:
        """Show what decides."""
        return f"<Vigil, silent for {self.silent:.1f} s of {self.lease:g} s>"

    def look(self, heard: float, now: float) -> bool:
        """Whether the lease is over; ``heard`` is when anything came last."""
        awake = min(now - self._looked, self.lease / 2)
        if heard > self._heard:
            self._heard = heard
            self.silent = min(max(now - heard, 0.0), awake)
        else:
            self.silent += awake
        self._looked = now
        return self.silent >= self.lease

    def sent(self, now: float) -> None:
        """Something was sent."""
        self._sent = now

    def due(self, now: float) -> bool:
        """Whether a sign of life is due."""
        return now - self._sent >= self.lease / BEATS

    def pause(self, now: float) -> float:
        """Seconds until the next look: when a sign is due, or the lease is over."""
        beat = self.lease / BEATS
        wait = beat if self.due(now) else self._sent + beat - now
        return max(min(wait, self.lease - self.silent), 0.0)


def check_lease(lease: float) -> float:
    """Return a lease in seconds; PlanError unless it is between the limits."""
    if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
        message = (
            f"a lease is between {SHORTEST_LEASE} and {LONGEST_LEASE:.0f} seconds, "
            f"not {lease}"
        )
        raise PlanError(message)
    return float(lease)
