"""Control channels of a test: both ends of one, and strangers that connect."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from weightsync.channel import Channel, Endpoint, Listener, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Blob(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class Kept(msgspec.Struct, frozen=True, tag=True, dict=True):
    data: bytes


Message = Ping | Blob | Kept


async def echo(body: bytes, channel: Channel[Any]) -> None:
    """Answer each message with itself, until the peer leaves."""
    channel.peer = body.decode() or channel.peer
    while True:
        await channel.send(await channel.receive())


@asynccontextmanager
async def serving(handler: Any = echo) -> AsyncIterator[Listener]:
    async with anyio.create_task_group() as tasks, await Listener.open() as listener:
        tasks.start_soon(listener.serve, Message, handler)
        yield listener
        await listener.aclose()


@dataclass
class Peer:
    """The serving end of one channel, held open for a test to look at."""

    channels: list[Channel[Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    arrived: anyio.Event = field(default_factory=anyio.Event)

    async def hold(self, body: bytes, channel: Channel[Any]) -> None:
        self.bodies.append(body)
        self.channels.append(channel)
        self.arrived.set()
        await anyio.sleep_forever()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Channel[Any], Channel[Any]]]:
    peer = Peer()
    async with serving(peer.hold) as listener:
        async with await connect(listener.endpoint, b"", Message, timeout=5) as channel:
            await peer.arrived.wait()
            yield channel, peer.channels[0]


def hello(endpoint: Endpoint, **changes: object) -> bytes:
    fields = {
        "magic": "weightsync",
        "protocol": 1,
        "token": endpoint.token,
        "body": b"intruder",
    }
    body = msgspec.msgpack.encode(fields | changes)
    return len(body).to_bytes(4, "big") + body


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


async def raw(endpoint: Endpoint) -> anyio.abc.SocketStream:
    return await anyio.connect_tcp(endpoint.host, endpoint.port)


async def until_dropped(stream: anyio.abc.SocketStream) -> None:
    """Wait for the listener to close the connection."""
    with (
        anyio.fail_after(5),
        pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)),
    ):
        await stream.receive()


async def assert_drops(listener: Listener, expected: int) -> None:
    with anyio.move_on_after(5):
        while listener.dropped < expected:
            await anyio.sleep(0.01)

    assert expected == listener.dropped


async def assert_serves(listener: Listener) -> None:
    async with await connect(listener.endpoint, b"good", Message, timeout=5) as channel:
        await channel.send(Ping(number=1))

        assert Ping(number=1) == await channel.receive()
