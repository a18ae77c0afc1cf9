"""Control channels: typed msgpack messages, length-prefixed, over authenticated TCP.

A frame is a 4-byte big-endian length and one msgpack document. The connecting side
sends a ``Hello`` that carries the listener's token; the listener answers with a
``Welcome``; after that either side sends messages of the caller's own union. Whatever
does not say a right hello in time is dropped without an answer. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
import msgspec
from anyio.abc import SocketAttribute

from weightsync.errors import (
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.forked import hold
from weightsync.framing import FramedStream, frame, joined

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import SocketListener, SocketStream

__all__ = ["Channel", "Endpoint", "Listener", "connect"]

MAGIC = "weightsync"
PROTOCOL = 1

# The largest frame accepted from a peer that has not shown the token yet.
MAX_HELLO = 4096
# The largest frame after that: manifests of a very large model are some ten MiB.
MAX_FRAME = 256 << 20
# A connection that has not said a right hello after this many seconds is dropped.
HELLO_SECONDS = 10.0
# Connections that may wait for their hello at the same time; further ones are dropped.
MAX_UNPROVEN = 256

_logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a listener is, and the token that it expects; to be shared in the store."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        """Write ``host:port``; the token is a secret and is never shown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __repr__(self) -> str:
        """Write the address without the token."""
        return f"Endpoint({self})"


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    magic: str
    protocol: int
    token: str
    body: bytes


class _Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    magic: str
    protocol: int


_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_welcome_decoder = msgspec.msgpack.Decoder(_Welcome)


class Channel(Generic[MessageT]):
    """Messages to and from one peer that has proved itself.

    Made by ``connect`` and ``Listener.serve``. Any number of tasks may send; one
    receives. ``peer`` describes the other side in messages and may be set at any time.
    """

    def __init__(
        self, stream: FramedStream, decoder: msgspec.msgpack.Decoder[MessageT]
    ) -> None:
        self._stream = stream
        self._decoder = decoder

    def __repr__(self) -> str:
        """Show the peer and the state."""
        return f"<Channel to {self.peer}, {'closed' if self.closed else 'open'}>"

    def __del__(self) -> None:
        """Warn about a channel that was dropped while open."""
        if not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, 2, source=self)

    @property
    def peer(self) -> str:
        """What messages call the other side."""
        return self._stream.peer

    @peer.setter
    def peer(self, description: str) -> None:
        """Name the other side."""
        self._stream.peer = description

    @property
    def heard(self) -> float:
        """When any bytes came last, by ``time.monotonic``."""
        return self._stream.heard

    @property
    def closed(self) -> bool:
        """Whether the channel was closed on this side."""
        return self._stream.closed

    async def __aenter__(self) -> Channel[MessageT]:
        """Enter; leaving closes the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.aclose()

    async def send(self, *messages: object) -> None:
        """Send messages in order, each whole or not at all.

        A send that is cancelled after its first byte closes the channel, because the
        peer could no longer tell where the next message begins.

        Raises ProtocolError for a message over ``MAX_FRAME``, PeerError when the
        connection broke, ClosedError when the channel was closed on this side.
        """
        for whole in joined(frame(message, MAX_FRAME) for message in messages):
            await self._stream.send(whole)

    async def receive(self) -> MessageT:
        """Return the next message.

        A cancelled receive loses nothing. Raises PeerError when the peer left,
        ProtocolError (and closes the channel) for what is not a message of ours,
        ClosedError when the channel was closed on this side.
        """
        return await self._stream.receive(self._decoder, MAX_FRAME)

    async def send_eof(self) -> None:
        """Tell the peer that nothing follows; what it sends can still be received.

        Raises PeerError when the connection broke, ClosedError when it was closed.
        """
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection; again does nothing. Pending calls get ClosedError."""
        await self._stream.aclose()


class Listener:
    """Accepts channels from peers that know the token of its endpoint.

    ``dropped`` counts the connections that were not accepted.
    """

    def __init__(self, listener: SocketListener, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.dropped = 0
        self._listener = listener
        self._unproven = 0
        self._closed = False
        self._scope = anyio.CancelScope()
        hold(self, listener.extra(SocketAttribute.raw_socket).fileno)

    def __repr__(self) -> str:
        """Show the address and the state."""
        state = "closed" if self._closed else "open"
        return f"<Listener on {self.endpoint}, {state}, {self.dropped} dropped>"

    def __del__(self) -> None:
        """Warn about a listener that was dropped while open."""
        if not getattr(self, "_closed", True):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, 2, source=self)

    async def __aenter__(self) -> Listener:
        """Enter; leaving closes the listener."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the listener."""
        await self.aclose()

    @classmethod
    async def open(cls, host: str = "127.0.0.1", *, port: int = 0) -> Listener:
        """Listen on exactly this address, with a fresh token; port 0 picks one.

        Raises PeerError when the address cannot be listened on.
        """
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            numeric = str(found[0][4][0])
            multi = await anyio.create_tcp_listener(
                local_host=numeric, local_port=port, backlog=1024
            )
        except OSError as error:
            raise PeerError(f"cannot listen on {host}:{port}: {error}") from error
        listener = cast("SocketListener", multi.listeners[0])
        bound = listener.extra(SocketAttribute.local_port)
        token = secrets.token_hex(16)
        return cls(listener, Endpoint(host=numeric, port=int(bound), token=token))

    async def serve(
        self,
        message_type: Any,
        handler: Callable[[bytes, Channel[Any]], Awaitable[None]],
    ) -> None:
        """Call ``handler(hello_body, channel)`` in a task of its own for each peer.

        Runs until ``aclose``, which also cancels the handlers. A channel is closed
        when its handler returns. An exception of a handler is logged and concerns
        nobody else. May be called once.
        """
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        with self._scope:
            async with anyio.create_task_group() as tasks:
                while (stream := await self._accept()) is not None:
                    tasks.start_soon(self._attend, stream, decoder, handler)
                tasks.cancel_scope.cancel()

    async def aclose(self) -> None:
        """Stop listening and end ``serve``; again does nothing."""
        if not self._closed:
            self._closed = True
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._listener.aclose()

    async def _accept(self) -> SocketStream | None:
        while not self._closed:
            try:
                return await self._listener.accept()
            except anyio.ClosedResourceError:
                break
            except OSError:
                # The machine is out of descriptors or memory, or this peer went before
                # it was accepted. Both pass.
                await anyio.sleep(0.05)
        return None

    async def _attend(
        self,
        stream: SocketStream,
        decoder: msgspec.msgpack.Decoder[Any],
        handler: Callable[[bytes, Channel[Any]], Awaitable[None]],
    ) -> None:
        try:
            channel, body = await self._prove(stream, decoder)
        except (WeightSyncError, OSError) as error:
            self.dropped += 1
            _logger.debug("dropped a connection to %s: %s", self.endpoint, error)
            return
        try:
            await handler(body, channel)
        except WeightSyncError as error:
            _logger.info("the channel to %s ended: %s", channel.peer, error)
        except Exception:
            # The fault of one peer; the others and the listener go on.
            _logger.exception("the handler of %s failed", channel.peer)
        finally:
            await channel.aclose()

    async def _prove(
        self, stream: SocketStream, decoder: msgspec.msgpack.Decoder[Any]
    ) -> tuple[Channel[Any], bytes]:
        self._unproven += 1
        try:
            if self._unproven > MAX_UNPROVEN:
                raise ProtocolError(
                    f"more than {MAX_UNPROVEN} connections said no hello"
                )
            with anyio.fail_after(HELLO_SECONDS):
                return await self._welcome(stream, decoder)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)
            raise
        finally:
            self._unproven -= 1

    async def _welcome(
        self, stream: SocketStream, decoder: msgspec.msgpack.Decoder[Any]
    ) -> tuple[Channel[Any], bytes]:
        framed = FramedStream(stream, _remote(stream))
        hello = await framed.receive(_hello_decoder, MAX_HELLO)
        _check_version(framed.peer, hello)
        token = self.endpoint.token
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            raise ProtocolError(f"{framed.peer} does not know the token")
        await framed.send(frame(_Welcome(magic=MAGIC, protocol=PROTOCOL), MAX_HELLO))
        return Channel(framed, decoder), hello.body


def _remote(stream: SocketStream) -> str:
    address = stream.extra(SocketAttribute.remote_address)
    return f"{address[0]}:{address[1]}"


def _check_version(peer: str, message: _Hello | _Welcome) -> None:
    if message.magic != MAGIC or message.protocol != PROTOCOL:
        raise ProtocolError(
            f"{peer} speaks {message.magic!r} {message.protocol}; "
            f"expected {MAGIC!r} {PROTOCOL}"
        )


async def connect(
    endpoint: Endpoint,
    hello_body: bytes,
    message_type: Any,
    *,
    timeout: float,
    peer: str | None = None,
) -> Channel[Any]:
    """Connect to a listener and return the channel once it has accepted the hello.

    ``hello_body`` is handed to the listener's handler as it is; ``message_type`` is
    the union of messages that this side receives.

    Raises TimedOutError, PeerError when the listener is not there or does not accept,
    ProtocolError when something else answers.
    """
    name = str(endpoint) if peer is None else peer
    hello = _Hello(
        magic=MAGIC, protocol=PROTOCOL, token=endpoint.token, body=hello_body
    )
    encoded = frame(hello, MAX_HELLO)
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
    with anyio.move_on_after(timeout):
        return await _introduce(endpoint, encoded, decoder, name)
    raise TimedOutError(f"no channel to {name} at {endpoint} within {timeout} s")


async def _introduce(
    endpoint: Endpoint,
    hello: bytearray,
    decoder: msgspec.msgpack.Decoder[Any],
    peer: str,
) -> Channel[Any]:
    try:
        stream = await anyio.connect_tcp(endpoint.host, endpoint.port)
    except OSError as error:
        raise PeerError(f"cannot connect to {peer} at {endpoint}: {error}") from error
    framed = FramedStream(stream, peer)
    try:
        await framed.send(hello)
        welcome = await framed.receive(_welcome_decoder, MAX_HELLO)
        _check_version(peer, welcome)
    except BaseException:
        await framed.aclose()
        raise
    return Channel(framed, decoder)
