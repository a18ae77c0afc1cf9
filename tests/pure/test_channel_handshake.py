"""The handshake of control channels: who is let in, and whom a caller finds."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute

from tests.pure.channels import (
    Message,
    Ping,
    assert_drops,
    assert_serves,
    echo,
    framed,
    hello,
    raw,
    serving,
    until_dropped,
)
from weightsync import channel as channel_module
from weightsync.channel import Channel, Endpoint, Listener, connect
from weightsync.errors import PeerError, ProtocolError, TimedOutError

pytestmark = pytest.mark.anyio


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


@pytest.mark.usefixtures("collected")
async def test_a_cancelled_connect_leaves_no_descriptor_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(host="127.0.0.1", port=silent.getsockname()[1], token="")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with anyio.move_on_after(0.01):
                await connect(endpoint, b"", Message, timeout=5)
        await anyio.sleep(0.05)

        assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("collected")
async def test_a_thousand_channels_leave_no_descriptor_behind() -> None:
    async with serving() as listener:
        await assert_serves(listener)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            channel = await connect(listener.endpoint, b"", Message, timeout=5)
            await channel.aclose()
        await anyio.sleep(0.1)

        assert abs(len(os.listdir("/proc/self/fd")) - before) <= 2
