"""Control channels: frames, the handshake, and peers that do everything wrong."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import socket
import warnings
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute

from weightsync import channel as channel_module
from weightsync.channel import Channel, Endpoint, Listener, connect
from weightsync.errors import (
    ClosedError,
    PeerError,
    ProtocolError,
    TimedOutError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


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


async def test_messages_arrive_in_order_and_typed() -> None:
    async with pair() as (client, server):
        for number in range(10):
            await client.send(Ping(number=number))
        await client.send(Blob(data=b"\x00\xff"))

        expected = [*map(Ping, range(10)), Blob(data=b"\x00\xff")]
        assert expected == [await server.receive() for _ in expected]


async def test_both_sides_may_talk_at_once() -> None:
    async with pair() as (client, server):
        await client.send(Ping(number=1))
        await server.send(Ping(number=2))

        assert Ping(number=1) == await server.receive()
        assert Ping(number=2) == await client.receive()


async def test_a_message_of_many_megabytes_arrives_whole() -> None:
    data = os.urandom(1 << 20) * 20
    async with serving() as listener:
        async with await connect(listener.endpoint, b"", Message, timeout=5) as channel:
            await channel.send(Blob(data=data))

            assert Blob(data=data) == await channel.receive()


async def test_concurrent_senders_do_not_mix_their_frames() -> None:
    blobs = [Blob(data=bytes([value]) * 300_000) for value in range(8)]
    async with pair() as (client, server), anyio.create_task_group() as tasks:
        for blob in blobs:
            tasks.start_soon(client.send, blob)
        received = [await server.receive() for _ in blobs]

        assert blobs == sorted(received, key=lambda blob: blob.data[0])


async def test_the_handler_gets_the_body_of_the_hello() -> None:
    peer = Peer()
    async with serving(peer.hold) as listener:
        async with await connect(listener.endpoint, b"body", Message, timeout=5):
            await peer.arrived.wait()

            assert [b"body"] == peer.bodies


async def test_small_messages_are_not_delayed_and_dead_hosts_are_noticed() -> None:
    async with pair() as ends:
        for end in ends:
            raw_socket = end._stream._stream.extra(SocketAttribute.raw_socket)

            assert raw_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert raw_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_the_listener_listens_on_the_loopback_address_only() -> None:
    async with serving() as listener:
        found = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                address, port = line.split()[1].split(":")
                listens = line.split()[3] == "0A"
                if listens and int(port, 16) == listener.endpoint.port:
                    found.add(address)

        assert {"0100007F"} == found


async def test_each_listener_has_a_token_of_128_bits_that_is_never_shown() -> None:
    async with await Listener.open() as one, await Listener.open() as other:
        assert one.endpoint.token != other.endpoint.token
        assert 16 == len(bytes.fromhex(one.endpoint.token))
        for shown in (repr(one), repr(one.endpoint), str(one.endpoint)):
            assert one.endpoint.token not in shown


async def test_an_address_that_is_not_ours_is_an_error_that_names_it() -> None:
    with pytest.raises(PeerError, match=r"203\.0\.113\.1"):
        await Listener.open("203.0.113.1")


async def test_a_wrong_token_is_dropped_and_the_caller_is_told() -> None:
    async with serving() as listener:
        wrong = msgspec.structs.replace(listener.endpoint, token="0" * 32)
        with pytest.raises(PeerError, match="closed the connection"):
            await connect(wrong, b"", Message, timeout=5)

        await assert_drops(listener, 1)
        await assert_serves(listener)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.marker),))


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x04\x00" + os.urandom(1024),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        (1 << 62).to_bytes(8, "big"),
        framed(b""),
        framed(b"\x91" * 4000),
        framed(b"\xdf\xff\xff\xff\xff"),
        framed(b"\xa4\xff\xff\xff\xff"),
        framed(msgspec.msgpack.encode({"magic": "weightsync"})),
    ],
    ids=["random", "http", "2**62", "empty", "deep", "map", "utf-8", "partial"],
)
async def test_garbage_is_dropped_and_disturbs_nobody(garbage: bytes) -> None:
    async with serving() as listener:
        async with await connect(listener.endpoint, b"", Message, timeout=5) as good:
            async with await raw(listener.endpoint) as intruder:
                await intruder.send(garbage)
                await until_dropped(intruder)
            await good.send(Ping(number=7))

            assert Ping(number=7) == await good.receive()
        await assert_drops(listener, 1)
        await assert_serves(listener)


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": "other"},
        {"protocol": 2},
        {"protocol": "1"},
        {"token": "é\x00"},
        {"token": ""},
        {"body": 3},
        {"more": 1},
        {"body": b"x" * 5000},
    ],
    ids=str,
)
async def test_a_hello_that_is_not_exactly_right_is_dropped(
    changes: dict[str, object],
) -> None:
    async with serving() as listener:
        async with await raw(listener.endpoint) as intruder:
            await intruder.send(hello(listener.endpoint, **changes))
            await until_dropped(intruder)

        await assert_drops(listener, 1)
        await assert_serves(listener)


async def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    trap = pickle.dumps(Trap(marker))
    async with serving() as listener:
        for garbage in (
            b"\xff" + trap,
            framed(trap),
            hello(listener.endpoint) + framed(trap),
        ):
            async with await raw(listener.endpoint) as intruder:
                await intruder.send(garbage)
                with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
                    async for _ in intruder:
                        pass
        await assert_serves(listener)

    assert not marker.exists()


async def test_half_a_hello_and_then_silence_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "HELLO_SECONDS", 0.3)
    async with serving() as listener:
        async with await raw(listener.endpoint) as intruder:
            await intruder.send(hello(listener.endpoint)[:20])
            await assert_serves(listener)
            await until_dropped(intruder)

        await assert_drops(listener, 1)


async def test_a_peer_that_leaves_in_the_middle_of_its_hello_disturbs_nobody() -> None:
    async with serving() as listener:
        async with await raw(listener.endpoint) as intruder:
            await intruder.send(hello(listener.endpoint)[:20])
        await assert_serves(listener)

        await assert_drops(listener, 1)


async def test_too_many_silent_connections_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNPROVEN", 4)
    async with serving() as listener:
        silent = [await raw(listener.endpoint) for _ in range(4)]
        async with await raw(listener.endpoint) as late:
            await until_dropped(late)
        for stream in silent:
            await stream.aclose()
        await assert_drops(listener, 5)
        await assert_serves(listener)


async def test_a_length_takes_no_memory_before_the_bytes_arrive() -> None:
    async with pair() as (client, server):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await client._stream._stream.send((200 << 20).to_bytes(4, "big") + b"x" * 100)
        with anyio.move_on_after(0.2):
            await server.receive()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

        assert grown < 4096


async def test_a_frame_over_the_limit_closes_the_channel() -> None:
    async with pair() as (client, server):
        await client._stream._stream.send(((256 << 20) + 1).to_bytes(4, "big"))
        with pytest.raises(ProtocolError, match="268435457 bytes"):
            await server.receive()
        with pytest.raises(ClosedError):
            await server.receive()


async def test_a_message_over_the_limit_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME", 100)
    async with pair() as (client, server):
        with pytest.raises(ProtocolError, match=r"Blob of .* bytes"):
            await client.send(Blob(data=b"x" * 200))
        await client.send(Ping(number=1))

        assert Ping(number=1) == await server.receive()


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(64),
        b"",
        msgspec.msgpack.encode({"type": "Other"}),
        msgspec.msgpack.encode({"type": "Ping", "number": "1"}),
    ],
    ids=["random", "empty", "unknown", "mistyped"],
)
async def test_garbage_on_an_open_channel_is_an_error_that_names_the_peer(
    garbage: bytes,
) -> None:
    async with pair() as (client, server):
        server.peer = "trainer rank 3"
        await client._stream._stream.send(framed(garbage))
        with pytest.raises(ProtocolError, match="trainer rank 3"):
            await server.receive()
        with pytest.raises(PeerError):
            await client.receive()


async def test_a_peer_that_leaves_is_an_error_that_names_it() -> None:
    async with pair() as (client, server):
        server.peer = "trainer rank 3"
        await client.aclose()
        with pytest.raises(PeerError, match="trainer rank 3 closed the connection"):
            await server.receive()


async def test_a_message_for_many_is_encoded_once() -> None:
    data = os.urandom(3_000_001)
    message, found = Kept(data), []
    async with pair() as first, pair() as second:
        for client, server in (first, second, first):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.send, message)
                found.append(await server.receive())

    assert [Kept(data)] * 3 == found
    assert channel_module.frame(message, 1) is channel_module.frame(message, 1)
    assert "frame" not in msgspec.structs.replace(message, data=b"").__dict__


async def test_a_peer_that_leaves_in_the_middle_of_a_message_is_an_error() -> None:
    async with pair() as (client, server):
        await client._stream._stream.send(b"\x00\x00\x00\x10half")
        await client.aclose()
        with pytest.raises(
            PeerError, match="in the middle of a message, after 8 bytes"
        ):
            await server.receive()


async def test_sending_to_a_peer_that_left_is_an_error() -> None:
    async with pair() as (client, server):
        await server.aclose()
        with pytest.raises(PeerError), anyio.fail_after(5):
            while True:
                await client.send(Blob(data=b"x" * 1000))


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with pair() as (client, server):
        frame = channel_module.frame(Ping(number=5), 100)
        for byte in frame:
            await client._stream._stream.send(bytes([byte]))
            with anyio.move_on_after(0.001):
                received = await server.receive()

        with anyio.move_on_after(5):
            received = received if "received" in locals() else await server.receive()
        assert Ping(number=5) == received


async def test_a_send_cancelled_in_the_middle_closes_the_channel() -> None:
    async with pair() as (client, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, Blob(data=bytes(64 << 20)))
            await server._stream._fill(4)
            tasks.cancel_scope.cancel()

        with pytest.raises(ClosedError):
            await client.send(Ping(number=1))
        with pytest.raises(PeerError, match="in the middle of a message"):
            await server.receive()


async def test_a_send_cancelled_while_it_waits_its_turn_leaves_the_channel_whole() -> (
    None
):
    async with pair() as (client, server), anyio.create_task_group() as tasks:
        first = Blob(data=bytes(64 << 20))
        tasks.start_soon(client.send, first)
        await server._stream._fill(4)
        with anyio.move_on_after(0.1) as scope:
            await client.send(Ping(number=1))

        assert scope.cancelled_caught
        assert first == await server.receive()
        await client.send(Ping(number=2))
        assert Ping(number=2) == await server.receive()


async def test_a_channel_may_be_closed_twice_and_ends_a_pending_receive() -> None:
    async with pair() as (client, _):
        async with anyio.create_task_group() as tasks:

            async def close() -> None:
                await anyio.sleep(0.1)
                await client.aclose()
                await client.aclose()

            tasks.start_soon(close)
            with pytest.raises(ClosedError):
                await client.receive()


async def test_a_handler_that_fails_ends_its_own_channel_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail_on_demand(body: bytes, channel: Channel[Any]) -> None:
        if body == b"bad":
            raise RuntimeError("on demand")
        await echo(body, channel)

    async with serving(fail_on_demand) as listener:
        async with await connect(listener.endpoint, b"bad", Message, timeout=5) as bad:
            with pytest.raises(PeerError):
                await bad.receive()
        await assert_serves(listener)

    assert "on demand" in caplog.text


async def test_nobody_listening_is_an_error_that_names_the_address() -> None:
    async with await Listener.open() as listener:
        endpoint = listener.endpoint

    with pytest.raises(PeerError, match=str(endpoint)):
        await connect(endpoint, b"", Message, timeout=5)


async def test_a_listener_that_never_answers_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(host="127.0.0.1", port=silent.getsockname()[1], token="")
        with pytest.raises(TimedOutError, match=str(endpoint)):
            await connect(endpoint, b"", Message, timeout=0.2)


async def test_something_else_that_answers_is_an_error() -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(framed(b"HTTP/1.1 400 Bad Request"))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.serve, answer)
            port = other.extra(SocketAttribute.local_port)
            endpoint = Endpoint(host="127.0.0.1", port=port, token="")
            with pytest.raises(ProtocolError, match=str(endpoint)):
                await connect(endpoint, b"", Message, timeout=5)
            tasks.cancel_scope.cancel()


async def test_closing_the_listener_ends_its_channels_and_frees_its_port() -> None:
    async with serving() as listener:
        channel = await connect(listener.endpoint, b"", Message, timeout=5)
        await listener.aclose()
        await listener.aclose()
        with pytest.raises(PeerError):
            await channel.receive()
        await channel.aclose()

    with socket.create_server(("127.0.0.1", listener.endpoint.port)):
        pass


async def test_a_cancelled_connect_leaves_no_descriptor_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(host="127.0.0.1", port=silent.getsockname()[1], token="")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with anyio.move_on_after(0.01):
                await connect(endpoint, b"", Message, timeout=5)
        await anyio.sleep(0.05)

        assert before == len(os.listdir("/proc/self/fd"))


async def test_a_thousand_channels_leave_no_descriptor_behind() -> None:
    async with serving() as listener:
        await assert_serves(listener)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            channel = await connect(listener.endpoint, b"", Message, timeout=5)
            await channel.aclose()
        await anyio.sleep(0.1)

        assert abs(len(os.listdir("/proc/self/fd")) - before) <= 2


async def test_a_channel_dropped_open_warns() -> None:
    async with serving() as listener:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            channel: Any = await connect(listener.endpoint, b"", Message, timeout=5)
            stream = channel._stream
            del channel
            gc.collect()
            await stream.aclose()

        assert any("unclosed <Channel to" in str(warning.message) for warning in caught)
