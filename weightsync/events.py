"""The membership events of a job, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import ClosedError

if TYPE_CHECKING:
    from typing import Self

    from weightsync.following import Following
    from weightsync.membership import MembershipEvent
    from weightsync.runtime import Runtime


class Events:
    """An async iterator over the events after a number; ``Trainer.events`` makes it.

    Used by one task at a time. It ends when the transport is closed, or the trainers
    have, and raises PeerError where they failed.
    """

    def __init__(self, runtime: Runtime, following: Following, after: int) -> None:
        self._runtime = runtime
        self._following = following
        self._number = after

    def __aiter__(self) -> Self:
        """Iterate over the events."""
        return self

    async def __anext__(self) -> MembershipEvent:
        """Wait for the next event, however long it takes."""
        try:
            event = await self._runtime.acall(self._following.next, self._number)
        except ClosedError:
            raise StopAsyncIteration from None
        self._number = event.number
        return event


class BlockingEvents:
    """As ``Events``, for synchronous code."""

    def __init__(self, runtime: Runtime, following: Following, after: int) -> None:
        self._runtime = runtime
        self._following = following
        self._number = after

    def __iter__(self) -> Self:
        """Iterate over the events."""
        return self

    def __next__(self) -> MembershipEvent:
        """Wait for the next event, however long it takes."""
        try:
            event = self._runtime.call(self._following.next, self._number)
        except ClosedError:
            raise StopIteration from None
        self._number = event.number
        return event
