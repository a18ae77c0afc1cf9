"""A replica of as many ranks as there may be is introduced over a real channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec
import pytest

from tests.pure.leading import manifest
from weightsync.channel import MAX_HELLO, Listener, connect
from weightsync.fencing import Fence
from weightsync.hellos import RankHello, TrainerHello
from weightsync.hub import Hub
from weightsync.leader import Incoming, Leader
from weightsync.messages import MAX_RANKS, Accepted, FormLink, ToReplica
from weightsync.peer import Peer, Sign, local_pair
from weightsync.runtime import Tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

LONGEST = "\U0001f600" * 256
"""A name or an incarnation: 1,024 bytes."""

TOKEN_BYTES = 128
"""For what a channel adds to the hello of a role."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def silent() -> AsyncIterator[Peer]:
    """Somebody who is told much and says nothing."""
    mine, theirs = local_pair("us", "somebody")
    yield Peer(mine)
    await mine.aclose()
    await theirs.aclose()


def _hello(rank: int, ranks: int, name: str = "g", incarnation: str = "") -> RankHello:
    handle = f"nccl2:-1:0:{rank:032x}:127.0.0.1:{10_000 + rank}/"
    return RankHello(name, rank, ranks, "inplace", handle, incarnation=incarnation)


def _hub(ranks: int, silent: Peer, name: str = "g") -> Hub:
    hub = Hub(name, "inplace", ranks, instance="0" * 16)
    for rank in range(ranks):
        hub.rank_joined(_hello(rank, ranks, name), manifest("w"), silent)
    return hub


async def _joined(hub: Hub, leader: Leader, listener: Listener) -> FormLink:
    """Let a hub join; return how its link is to be formed."""
    hello = msgspec.msgpack.encode(hub.hello)
    to, kind = listener.endpoint, ToReplica | Sign
    async with await connect(to, hello, kind, timeout=20) as channel:
        await channel.send(hub.held)
        assert isinstance(await channel.receive(), Accepted)
        (link,) = leader.members.replicas
        leader.members.offered(0, link, "of the trainer")
        form: FormLink = await channel.receive()
    return form


async def test_a_replica_of_4096_ranks_joins(silent: Peer) -> None:
    hub = _hub(MAX_RANKS, silent)
    async with anyio.create_task_group() as group:
        tasks = Tasks(group)
        leader = Leader(TrainerHello(0, 1), tasks, Fence("default", 0, None))
        leader.members.trainer_joined(0, 1, silent)
        async with await Listener.open() as listener:
            tasks.start_soon(listener.serve, Incoming | Sign, leader.attend)
            with anyio.fail_after(30):
                form = await _joined(hub, leader, listener)
        group.cancel_scope.cancel()
    handles = [_hello(rank, MAX_RANKS).handle for rank in range(MAX_RANKS)]

    assert ("of the trainer", *handles) == form.handles


async def test_hellos_with_the_longest_names_are_within_the_limit(silent: Peer) -> None:
    rank = _hello(MAX_RANKS - 1, MAX_RANKS, LONGEST, LONGEST)
    replica = _hub(1, silent, LONGEST).hello
    sizes = [len(msgspec.msgpack.encode(hello)) for hello in (rank, replica)]

    assert max(sizes) + TOKEN_BYTES < MAX_HELLO
