"""What the pool tells the pushes under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.agreement import Agreement
    from weightsync.errors import WeightSyncError
    from weightsync.replica import Replica


class Watcher:
    """Who wants to know what happens in the pool: the pushes under way."""

    def formed(self, replica: Replica) -> Agreement | None:
        """A link is formed; return what its ranks plan before a push goes to it."""

    def joined(self, replica: Replica) -> None:
        """A replica is active: the next push goes to it."""

    def ready(self, replica: Replica) -> None:
        """A replica may be able to take a version: a slot is open, plans are agreed."""

    def dropped(self, replica: Replica, error: WeightSyncError, *, clean: bool) -> None:
        """A replica is out of the pool."""

    def failed(self, error: WeightSyncError) -> None:
        """The trainers are broken: no push can succeed any more."""
