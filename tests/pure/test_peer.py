"""A conversation: what is said last arrives, whatever the other side says meanwhile."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from weightsync.channel import Channel, Listener, connect
from weightsync.peer import Peer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


async def test_what_is_said_last_arrives_though_the_other_side_is_not_heard() -> None:
    heard: list[str] = []
    ended = anyio.Event()

    async def leave(_: bytes, channel: Channel[Any]) -> None:
        """Leave with much unread, and with more to come."""
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
            await ended.wait()
            await anyio.sleep(0.1)  # a reset would be here by now
            for _ in range(10):
                await channel.send(Word("more"))
            with anyio.fail_after(5):
                heard.append((await channel.receive()).text)
        await listener.aclose()

    assert ["goodbye"] == heard
