"""Peer: a channel with a queue in front, so that deciding never waits for a network.

State machines call ``post`` and go on; a task writes. What arrives is handed over one
message at a time, so a handler that does not await changes its state atomically.

A channel that breaks tells that its process is gone. What it cannot tell is that a
process is frozen, or its host gone without a word: for that both sides say ``Beat``
where they have nothing else to say, and drop a peer that says nothing for a lease.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import msgspec

from weightsync.errors import ClosedError, PeerError, WeightSyncError
from weightsync.vigil import Vigil

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

MAX_QUEUED: Final = 10_000
"""A peer that has not read so many messages is stuck; messages are small."""

FLUSH_SECONDS: Final = 2.0
"""How long peers have to take what was posted before the connection is closed."""

FAREWELL_SECONDS: Final = 0.25
"""How long a peer has to take the reason for which it is dropped; it may be frozen."""


class Beat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either side: I am alive, and have nothing else to say."""


class Farewell(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either side: I have dropped you, because you were silent for so many seconds."""

    lease: float


Sign = Beat | Farewell
"""What a channel with a lease carries besides the messages of its parties."""


LINGER_SECONDS: Final = 1.0
"""How long a peer that was told the end has to close its side. A connection that is
closed while something is unread is reset, and the peer may lose what was said last."""


class MessageStream(Protocol):
    """What a peer is reached through: a ``Channel``, or one end of ``local_pair``."""

    @property
    def peer(self) -> str:
        """What messages call the other side."""
        ...

    @peer.setter
    def peer(self, description: str) -> None:
        """Let messages call it so."""

    @property
    def heard(self) -> float:
        """When anything came last, by ``time.monotonic``."""
        ...

    async def send(self, *messages: object) -> None:
        """Send messages, in order."""

    async def receive(self) -> Any:
        """Return the next message."""

    async def send_eof(self) -> None:
        """Tell the other side that nothing follows."""

    async def aclose(self) -> None:
        """Close; idempotent."""


class Peer:
    """One other process, as the loop of a transport sees it.

    ``lease`` is that of the channel, in seconds; a party of this process needs none.
    Who does not read ``queued`` messages is dropped.
    """

    def __init__(
        self,
        stream: MessageStream,
        *,
        lease: float | None = None,
        queued: int = MAX_QUEUED,
    ) -> None:
        self._stream = stream
        self._vigil: Vigil | None = None
        if lease is not None and not isinstance(stream, _LocalStream):
            self._vigil = Vigil(lease, time.monotonic())
        self._queued: Final = queued
        self._queue: deque[object] = deque()
        self._posted = anyio.Event()
        self._sending = 0
        self._scope: anyio.CancelScope | None = None
        self._finishing = False
        self.lost: WeightSyncError | None = None

    def __repr__(self) -> str:
        """Show whom."""
        return f"<Peer {self.name}>"

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._stream.peer

    @name.setter
    def name(self, name: str) -> None:
        """Let messages call it so."""
        self._stream.peer = name

    @property
    def lease(self) -> float | None:
        """Seconds of silence after which it is dropped, if ever."""
        return None if self._vigil is None else self._vigil.lease

    @property
    def silent(self) -> float:
        """Seconds since its last sign of life; 0 for a party of this process."""
        return max(time.monotonic() - self._stream.heard, 0.0)

    def post(self, message: object) -> None:
        """Queue a message. Nothing happens to one for a peer that is lost."""
        if self.lost is not None or self._finishing:
            return
        if len(self._queue) + self._sending >= self._queued:
            self.drop(PeerError(f"{self.name} does not read its messages"))
            return
        self._queue.append(message)
        self._posted.set()

    def drop(self, error: WeightSyncError) -> None:
        """End the conversation now, for this reason."""
        if self.lost is None:
            self.lost = error
        if self._scope is not None:
            self._scope.cancel()

    def finish(self) -> None:
        """End the conversation when what was posted is sent; hear nothing more."""
        self._finishing = True
        self._posted.set()

    def discard(self) -> None:
        """Forget what was posted: there will be no conversation, or it has ended."""
        self._finishing = True
        self._queue.clear()

    async def run(self, handle: Callable[[Any], None]) -> WeightSyncError:
        """Converse until the end; return why it ended.

        ``handle`` gets each message. It must not wait. A WeightSyncError that it raises
        ends the conversation with this peer.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if self.lost is not None:
                    tasks.cancel_scope.cancel()
                tasks.start_soon(self._write)
                tasks.start_soon(self._read, handle)
                if self._vigil is not None:
                    tasks.start_soon(self._keep, self._vigil)
        finally:
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
            self.discard()
        if self.lost is None:
            self.lost = ClosedError(f"the channel to {self.name} was closed")
        return self.lost

    async def _write(self) -> None:
        try:
            while self._queue or not self._finishing:
                await self._send_posted()
            await self._stream.send_eof()
        except WeightSyncError:
            # The reader will find the end, after what the peer said last.
            return
        await anyio.sleep(LINGER_SECONDS)
        self.drop(ClosedError(f"the channel to {self.name} was closed"))

    async def _send_posted(self) -> None:
        """Send all that was posted so far, together: that is one call for many."""
        messages = tuple(self._queue)
        self._queue.clear()
        self._posted = anyio.Event()
        if not messages:
            await self._posted.wait()
            return
        self._sending = len(messages)
        await self._stream.send(*messages)
        self._sending = 0
        if self._vigil is not None:
            self._vigil.sent(time.monotonic())

    async def _read(self, handle: Callable[[Any], None]) -> None:
        try:
            while True:
                message = await self._stream.receive()
                if isinstance(message, Farewell):
                    raise self._farewell(message)
                if not isinstance(message, Beat) and not self._finishing:
                    handle(message)
        except WeightSyncError as error:
            self.drop(error)

    def _farewell(self, message: Farewell) -> WeightSyncError:
        return PeerError(
            f"{self.name} removed this process, which gave no sign of life for "
            f"{message.lease:g} s"
        )

    async def _keep(self, vigil: Vigil) -> None:
        """Give signs of life, and end the conversation with a peer that gives none."""
        while not vigil.look(self._stream.heard, time.monotonic()):
            if vigil.due(time.monotonic()) and not self._sending:
                self.post(Beat())
            await anyio.sleep(vigil.pause(time.monotonic()))
        silence = f"{self.name} gave no sign of life for {vigil.lease:g} s"
        self.lost = PeerError(silence)
        if not self._sending:
            with anyio.move_on_after(FAREWELL_SECONDS), suppress(WeightSyncError):
                await self._stream.send(Farewell(vigil.lease))
        self.drop(self.lost)


class Conversations:
    """The conversations under way, and the wait for their end."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet = anyio.Event()
        self._quiet.set()
        self._flushed: float | None = None

    async def hold(self, peer: Peer, handle: Callable[[Any], None]) -> WeightSyncError:
        """``peer.run``, counted."""
        if self._count == 0:
            self._quiet = anyio.Event()
        self._count += 1
        try:
            return await peer.run(handle)
        finally:
            self._count -= 1
            if self._count == 0:
                self._quiet.set()

    async def flush(self) -> None:
        """Give what was posted last the time to be sent: so long, and once."""
        if self._flushed is None:
            self._flushed = anyio.current_time() + FLUSH_SECONDS
        with anyio.CancelScope(deadline=self._flushed):
            await self._quiet.wait()


class _LocalStream:
    """One end of a pair within this process."""

    def __init__(
        self,
        peer: str,
        send: MemoryObjectSendStream[Any],
        receive: MemoryObjectReceiveStream[Any],
    ) -> None:
        self.peer = peer
        self._send = send
        self._receive = receive

    @property
    def heard(self) -> float:
        """Now: who is of this process is as alive as whoever asks."""
        return time.monotonic()

    async def send(self, *messages: object) -> None:
        """Hand messages over as they are; messages are immutable."""
        try:
            for message in messages:
                await self._send.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerError(f"{self.peer} is gone") from error

    async def receive(self) -> Any:
        """Return the next message."""
        try:
            return await self._receive.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError) as error:
            raise PeerError(f"{self.peer} is gone") from error

    async def send_eof(self) -> None:
        """Close the direction to the other party."""
        self._send.close()

    async def aclose(self) -> None:
        """Close both directions."""
        self._send.close()
        self._receive.close()


def local_pair(first: str, second: str) -> tuple[MessageStream, MessageStream]:
    """Connect two parties of one process; each end is named after the other party."""
    to_second, from_first = anyio.create_memory_object_stream[Any](math.inf)
    to_first, from_second = anyio.create_memory_object_stream[Any](math.inf)
    return (
        _LocalStream(second, to_second, from_second),
        _LocalStream(first, to_first, from_first),
    )
