"""What a hub says of a rank that reported a fault before it went."""

from __future__ import annotations

import anyio
import pytest

from tests.pure.leading import Line, manifest
from weightsync.errors import PeerError
from weightsync.hellos import RankHello
from weightsync.hub import Hub
from weightsync.messages import (
    Ended,
    Fault,
    Leaving,
    LinkFailed,
)
from weightsync.peer import Peer, local_pair

pytestmark = pytest.mark.anyio

FAULT = Fault("PeerError", "waiting for signals: trainer rank 0 died")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _told(*, fault: Fault | None, announced: bool) -> tuple[list[type], Fault]:
    """Let rank 1 go; return what the leader hears, and the reason that rank 0 does."""
    lines: list[Line] = []
    peers: list[Peer] = []
    streams = [local_pair("us", name) for name in ("rank 0", "rank 1", "the leader")]
    async with anyio.create_task_group() as tasks:
        for mine, theirs in streams:
            peers.append(Peer(mine))
            lines.append(Line(theirs))
            tasks.start_soon(peers[-1].run, lambda message: None)
            tasks.start_soon(lines[-1].listen)
        hub = Hub("g", "staged", 2)
        for rank in range(2):
            hello = RankHello("g", rank, 2, "staged", "handle")
            hub.rank_joined(hello, manifest("w"), peers[rank])
        hub.speak(peers[2])
        await lines[2].all()
        if fault is not None:
            hub.on_rank(1, LinkFailed(0, fault))
        if announced:
            hub.on_rank(1, Leaving())
        else:
            hub.rank_lost(1, PeerError("rank 1 closed the connection"), clean=False)
        ended = await lines[0].next(Ended)
        heard = await lines[2].kinds()
        for _, theirs in streams:
            await theirs.aclose()
    return heard, ended.fault


@pytest.mark.parametrize("announced", [True, False], ids=["leaves", "is gone"])
async def test_a_rank_that_goes_after_a_fault_is_known_by_its_fault(
    announced: bool,
) -> None:
    heard, reason = await _told(fault=FAULT, announced=announced)

    assert Leaving not in heard
    assert (
        Fault("PeerError", f"rank 1 of replica 'g' failed: {FAULT.message}") == reason
    )


async def test_a_rank_that_leaves_without_a_fault_has_left() -> None:
    heard, reason = await _told(fault=None, announced=True)

    assert [Leaving] == heard
    assert Fault("PeerError", "rank 1 of replica 'g' left") == reason
