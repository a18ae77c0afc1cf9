"""Which rank of a replica is silent: its hub notices, and the leader shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from weightsync.elastic import Quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.peer import Peer

UNUSUAL: Final = 0.5
"""Of a lease: a rank that is well gives a sign after a quarter of it."""


class Silence:
    """What a hub tells of the signs of life of its ranks: only what is unusual.

    So it says nothing at all while they are well, however many they are.
    """

    def __init__(self, ranks: Mapping[int, Peer]) -> None:
        self._ranks: Final = ranks
        self._told: int | None = None

    def look(self) -> Quiet | None:
        """Return what the leader has to know now, if that has changed."""
        quiet = max(self._quiet(), key=lambda found: found.silent, default=Quiet())
        if quiet.rank == self._told:
            return None
        self._told = quiet.rank
        return quiet

    def _quiet(self) -> list[Quiet]:
        return [
            Quiet(rank, peer.silent, peer.lease)
            for rank, peer in self._ranks.items()
            if peer.lease is not None and peer.silent > UNUSUAL * peer.lease
        ]


class Sign(NamedTuple):
    """The last sign of life of a replica: of the rank that was silent for longest."""

    silent: float
    lease: float | None
    rank: int = 0


class Heard:
    """What the leader knows of the signs of life of a replica's ranks."""

    def __init__(self, hub: Peer) -> None:
        self._hub: Final = hub
        self._quiet = Quiet()
        self._told = 0.0

    def tell(self, quiet: Quiet, now: float) -> None:
        """The hub has told of a rank."""
        self._quiet, self._told = quiet, now

    def last(self, now: float) -> Sign:
        """Return the sign of life that is the oldest."""
        quiet, hub = self._quiet, Sign(self._hub.silent, self._hub.lease)
        if quiet.rank is None:
            return hub
        silent = quiet.silent + max(now - self._told, 0.0)
        return max(hub, Sign(silent, quiet.lease, quiet.rank), key=lambda s: s.silent)
