"""Control channels: messages in frames, and a peer that sends or ends badly."""

from __future__ import annotations

import gc
import os
import resource
import socket
import warnings
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute

from tests.pure.channels import (
    Blob,
    Kept,
    Message,
    Peer,
    Ping,
    framed,
    pair,
    serving,
)
from weightsync import channel as channel_module
from weightsync.channel import connect
from weightsync.errors import ClosedError, PeerError, ProtocolError

pytestmark = pytest.mark.anyio


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
