"""What an observer opens and closes: a channel to the leader, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import anyio

from weightsync.errors import ClosedError, TimedOutError, WeightSyncError
from weightsync.following import Following
from weightsync.hellos import ObserverHello
from weightsync.membership import Happened, TellMembership
from weightsync.messages import (
    Accepted,
    Ended,
    Leaving,
    ToObserver,
)
from weightsync.peer import Peer
from weightsync.session import RETRY_SECONDS, Session
from weightsync.store import FileAddress

if TYPE_CHECKING:
    from weightsync.place import Place
    from weightsync.runtime import Tasks


class ObserverSession(Session):
    """Follows the membership of a job, and may propose one; is no part of it."""

    following: Following

    def __init__(self, place: Place, tasks: Tasks) -> None:
        super().__init__(place, tasks)
        self._peer: Peer | None = None
        self._answered = anyio.Event()
        self._refusal: WeightSyncError | None = None

    async def _join(self) -> None:
        """Return when the leader has admitted this observer."""
        await self._await_file()
        hello = ObserverHello(self.place.lease)
        name = "the leader (trainer rank 0)"
        stream = await self._connect("leader", hello, ToObserver, name)
        self._rendezvous = (
            None  # has told its address: the store is not needed any more
        )
        self._peer = peer = Peer(stream, lease=self.place.lease)
        self.following = Following(peer)
        self._tasks.start_soon(self._converse, peer, self._handle, self._end)
        with anyio.move_on_after(self.place.timeout):
            await self._answered.wait()
        if self._refusal is not None:
            raise self._refusal
        if not self._answered.is_set():
            message = f"{name} did not answer within {self.place.timeout} s"
            raise TimedOutError(message)

    async def _await_file(self) -> None:
        """Opening the store of a file creates it; an observer changes nothing."""
        address = self.place.address
        if not isinstance(address, FileAddress):
            return
        with anyio.move_on_after(self.place.timeout):
            while not await anyio.Path(address.path).exists():  # noqa: ASYNC110 -- no event.
                await anyio.sleep(RETRY_SECONDS)
            return
        raise TimedOutError(f"no store at {address} within {self.place.timeout} s")

    async def _leave(self) -> None:
        """Say goodbye."""
        if self._peer is not None:
            self._peer.post(Leaving())
            self._peer.finish()
            self.following.end(ClosedError("the observer is closed"))

    def _handle(self, message: ToObserver) -> None:
        match message:
            case Accepted():
                self._answered.set()
            case Happened() | TellMembership():
                self.following.handle(message)
            case Ended():
                fault = message.fault
                closed = ClosedError("the trainers have closed")
                self._end(closed if fault is None else fault.error())
            case _:
                assert_never(message)

    def _end(self, error: WeightSyncError) -> None:
        if not self._answered.is_set():
            self._refusal = error
        self._answered.set()
        self.following.end(error)
