"""After its last message a side says nothing more, and that is no fault of anybody."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from weightsync.channel import Channel, Listener, connect
from weightsync.errors import ClosedError, WeightSyncError
from weightsync.peer import Peer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = pytest.mark.anyio


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


@asynccontextmanager
async def _connected() -> AsyncGenerator[tuple[Channel[Any], Channel[Any]]]:
    """Both ends of a channel."""
    here: list[Channel[Any]] = []
    came, over = anyio.Event(), anyio.Event()

    async def attend(_: bytes, channel: Channel[Any]) -> None:
        here.append(channel)
        came.set()
        await over.wait()

    async with anyio.create_task_group() as tasks, await Listener.open() as listener:
        tasks.start_soon(listener.serve, Word, attend)
        async with await connect(listener.endpoint, b"", Word, timeout=5) as there:
            with anyio.fail_after(5):
                await came.wait()
            yield here[0], there
        over.set()
        await listener.aclose()


async def test_who_is_silent_after_our_last_message_is_only_gone() -> None:
    """Its lease ends while we wait for it to close, and we cannot tell it any more."""
    ended: list[WeightSyncError] = []
    async with _connected() as (here, _there):
        peer = Peer(here, lease=0.3)
        peer.finish()
        with anyio.fail_after(5):
            ended.append(await peer.run(lambda _: None))

    assert ["gave no sign of life for 0.3 s"] == [str(e)[-30:] for e in ended]


async def test_a_message_after_the_last_one_is_refused() -> None:
    async with _connected() as (here, there):
        await here.send(Word("last"))
        await here.send_eof()
        with pytest.raises(ClosedError, match="has said its last message to"):
            await here.send(Word("more"))
        with anyio.fail_after(5):
            heard = await there.receive()

    assert "last" == heard.text
