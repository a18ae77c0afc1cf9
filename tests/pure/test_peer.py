"""A conversation: what is said last arrives, whatever the other side says meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from weightsync.channel import Channel, Listener, connect
from weightsync.errors import PeerError, ProtocolError
from weightsync.framing import frame, joined
from weightsync.peer import Peer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


async def test_what_is_said_last_arrives_though_the_other_side_is_not_heard() -> None:
    heard: list[str] = []
    told, ended = anyio.Event(), anyio.Event()

    async def leave(_: bytes, channel: Channel[Any]) -> None:
        """Leave with much unread, and with more to come."""
        await told.wait()  # what is said last has a second from here
        peer = Peer(channel)
        peer.post(Word("goodbye"))
        peer.finish()
        ended.set()
        await peer.run(lambda _: None)

    async with anyio.create_task_group() as tasks, await Listener.open() as listener:
        tasks.start_soon(listener.serve, Word, leave)
        channel = await connect(listener.endpoint, b"", Word, timeout=5)
        async with channel:
            for _ in range(1000):
                await channel.send(Word("unread" * 100))
            told.set()
            await ended.wait()
            await anyio.sleep(0.1)  # a reset would be here by now
            for _ in range(10):
                await channel.send(Word("more"))
            with anyio.fail_after(5):
                heard.append((await channel.receive()).text)
        await listener.aclose()

    assert ["goodbye"] == heard


class Slow:
    """A stream that takes its time, and what it was given at once."""

    peer = "somebody"
    heard = 0.0

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.go_on = anyio.Event()

    async def send(self, *messages: object) -> None:
        self.calls.append(messages)
        await self.go_on.wait()

    async def receive(self) -> Any:
        await anyio.sleep_forever()

    async def send_eof(self) -> None:
        raise PeerError("it is gone")

    async def aclose(self) -> None:
        pass


async def test_what_is_posted_while_a_stream_is_busy_goes_together_and_in_order() -> (
    None
):
    stream = Slow()
    peer = Peer(stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.run, lambda _: None)
        peer.post(0)
        await _until(lambda: len(stream.calls) == 1)
        for number in range(1, 5):
            peer.post(number)
        stream.go_on.set()
        await _until(lambda: len(stream.calls) == 2)
        peer.drop(PeerError("enough"))

    assert [(0,), (1, 2, 3, 4)] == stream.calls


async def test_what_is_being_sent_counts_as_queued() -> None:
    stream = Slow()
    peer = Peer(stream, queued=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.run, lambda _: None)
        for number in range(2):
            peer.post(number)
        await _until(lambda: len(stream.calls) == 1)
        peer.post(2)
        before = peer.lost
        peer.post(3)

    assert before is None
    assert "somebody does not read its messages" == str(peer.lost)


async def _until(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("size", [1, 4000, 5000, 400_000])
async def test_messages_of_any_size_arrive_one_by_one(size: int) -> None:
    words = [Word(str(number) * (size if number % 3 else 1)) for number in range(10)]
    heard: list[Word] = []

    async def listen(_: bytes, channel: Channel[Any]) -> None:
        with suppress(PeerError):
            while True:
                heard.append(await channel.receive())

    async with anyio.create_task_group() as tasks, await Listener.open() as listener:
        tasks.start_soon(listener.serve, Word, listen)
        async with await connect(listener.endpoint, b"", Word, timeout=5) as channel:
            await channel.send(*words)
            await channel.send(words[0])
            await _until(lambda: len(heard) == 11)
        await listener.aclose()

    assert [*words, words[0]] == heard


def test_small_frames_are_joined_and_large_ones_are_not_copied() -> None:
    frames = [frame(Word("x" * size), 1 << 20) for size in (1, 2, 9000, 3, 4)]
    found = list(joined(frames))

    assert [frames[0] + frames[1], frames[2], frames[3] + frames[4]] == found
    assert found[1] is frames[2]


def test_a_message_over_the_limit_comes_after_those_before_it() -> None:
    words = [Word("a"), Word("b"), Word("x" * 1000), Word("c")]
    frames = joined(frame(word, 100) for word in words)
    first = next(frames)

    assert frame(words[0], 100) + frame(words[1], 100) == first
    with pytest.raises(ProtocolError, match="limit is 100"):
        next(frames)
