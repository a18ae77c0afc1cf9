"""Length-prefixed frames over a TCP stream: whole ones, of a bounded size.

A frame is a 4-byte big-endian length and one msgpack document of that many bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, cast

import anyio
import msgspec
from anyio.abc import SocketAttribute

from weightsync.errors import ClosedError, PeerError, ProtocolError, WeightSyncError
from weightsync.forked import hold

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from anyio.abc import SocketStream

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 18
_AHEAD = 1 << 14  # read at once, so that many small frames take one call
_SMALL = 1 << 12
# Where a message that has a ``__dict__`` keeps its frame.
_KEPT = "frame"
_ENCODER = msgspec.msgpack.Encoder()
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


def frame(message: object, limit: int) -> bytearray:
    """Encode a message as one frame; ProtocolError when it is over the limit.

    A message that has a ``__dict__`` goes to many peers: it keeps its frame there, so
    it is encoded once. Nobody may change a frame.
    """
    kept: dict[str, bytearray] = getattr(message, "__dict__", {})
    if _KEPT not in kept:
        kept[_KEPT] = _encode(message, limit)
    return kept[_KEPT]


def _encode(message: object, limit: int) -> bytearray:
    buffer = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > limit:
        kind = type(message).__name__
        raise ProtocolError(
            f"a {kind} of {size} bytes was to be sent; the limit is {limit} bytes"
        )
    _LENGTH.pack_into(buffer, 0, size)
    return buffer


def joined(frames: Iterable[bytearray]) -> Iterator[bytearray]:
    """Join small frames that follow each other: one call sends them all.

    A large one may go to many peers, and is never copied. What ``frames`` raises comes
    after all that was before.
    """
    small = bytearray()
    try:
        for whole in frames:
            large = len(whole) > _SMALL
            small += b"" if large else whole
            if small and (large or len(small) >= _CHUNK):
                yield small
                small = bytearray()
            if large:
                yield whole
    except ProtocolError:
        if small:
            yield small
        raise
    if small:
        yield small


class FramedStream:
    """Sends and receives whole frames, and says who failed when it cannot.

    Any number of tasks may send; one receives. ``heard`` is the time (of
    ``time.monotonic``) at which any bytes came last.
    """

    def __init__(self, stream: SocketStream, peer: str) -> None:
        self.peer = peer
        self.heard = time.monotonic()
        self.closed = False
        self._ended = False
        self._stream = stream
        self._sending = anyio.Lock()
        self._received = bytearray()
        raw = stream.extra(SocketAttribute.raw_socket)
        _tune(raw)
        hold(self, raw.fileno)

    async def send(self, whole: bytearray) -> None:
        """Send a frame; a send cancelled after its first byte closes the stream."""
        async with self._sending:
            if self._ended:
                message = f"this side has said its last message to {self.peer}"
                raise ClosedError(message)
            with self._translated():
                try:
                    await self._send(memoryview(whole))
                except anyio.get_cancelled_exc_class():
                    await self.aclose()
                    raise

    async def _send(self, whole: memoryview) -> None:
        # In parts, because what the kernel does not take at once is copied: a frame for
        # a thousand peers must not be copied a thousand times.
        for start in range(0, len(whole), _CHUNK):
            # anyio asks for bytes and takes any buffer.
            await self._stream.send(cast("bytes", whole[start : start + _CHUNK]))

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], limit: int) -> T:
        """Return the next message; a cancelled receive loses nothing.

        What is too large or cannot be decoded is a ProtocolError and closes the stream.
        """
        try:
            return self._decode(decoder, await self._receive_body(limit))
        except ProtocolError:
            await self.aclose()
            raise

    async def _receive_body(self, limit: int) -> memoryview:
        await self._fill(_LENGTH.size)
        (size,) = _LENGTH.unpack_from(self._received)
        if size > limit:
            raise ProtocolError(
                f"{self.peer} announced a message of {size} bytes; "
                f"the limit is {limit} bytes"
            )
        end = _LENGTH.size + size
        await self._fill(end)
        body = memoryview(self._received)[_LENGTH.size : end]
        self._received = self._received[end:]
        return body

    def _decode(self, decoder: msgspec.msgpack.Decoder[T], body: memoryview) -> T:
        try:
            return decoder.decode(body)
        except _UNDECODABLE as error:
            raise ProtocolError(
                f"{self.peer} sent {len(body)} bytes that are not one of our messages: "
                f"{error}"
            ) from error

    async def send_eof(self) -> None:
        """Close this direction, after what was sent; a send is a ClosedError then."""
        with self._translated():
            if self.closed:
                raise anyio.ClosedResourceError
            self._ended = True
            try:
                await self._stream.send_eof()
            except OSError as error:
                raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Close at once, without waiting for the peer; again does nothing."""
        if not self.closed:
            self.closed = True
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _fill(self, size: int) -> None:
        # The buffer hardly outgrows one frame, and grows only with bytes that have
        # arrived.
        with self._translated():
            if self.closed:
                raise anyio.ClosedResourceError
            while (missing := size - len(self._received)) > 0:
                most = max(min(missing, _CHUNK), _AHEAD)
                self._received += await self._stream.receive(most)
                self.heard = time.monotonic()

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except (
            anyio.EndOfStream,
            anyio.ClosedResourceError,
            anyio.BrokenResourceError,
        ) as error:
            raise self._lost() from error

    def _lost(self) -> WeightSyncError:
        if self.closed:
            return ClosedError(f"the channel to {self.peer} was closed on this side")
        if self._received:
            return PeerError(
                f"{self.peer} left in the middle of a message, "
                f"after {len(self._received)} bytes"
            )
        return PeerError(f"{self.peer} closed the connection")


def _tune(raw: socket.socket) -> None:
    with suppress(OSError):  # A peer that is gone already shows at the next call.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Notice a vanished host after a minute; macOS lacks TCP_KEEPIDLE.
        idle = getattr(socket, "TCP_KEEPIDLE", 0x10)
        raw.setsockopt(socket.IPPROTO_TCP, idle, 30)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
