"""A transfer that is given up ends with a certain answer about its version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.pure.leading import held
from weightsync.hellos import RankHello, ReplicaHello
from weightsync.hub import Hub
from weightsync.messages import (
    Agree,
    Agreed,
    Arrived,
    Commit,
    Delivered,
    Discard,
    Discarded,
    Expect,
    PushEnded,
    PushRequest,
    Put,
    PutEnded,
    Stop,
    Terms,
)
from weightsync.peer import MessageStream, Peer, local_pair
from weightsync.pool import Members
from weightsync.push import Pushes
from weightsync.spec import Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.anyio

MANIFEST = Manifest.of((TensorSpec("w", "float32", (4,), Box((0,), (4,))),))
DIGEST = bytes(16)
EXPECT = Expect(1, 1, DIGEST)
DISCARD = Discard(1, ((1,),))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Wire:
    """Peers of this process, and what was posted to each."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self.ends: list[MessageStream] = []

    def peer(self, name: str) -> tuple[Peer, MessageStream]:
        """A peer that is running, and the other end."""
        mine, theirs = local_pair("us", name)
        peer = Peer(mine)
        self.ends.append(theirs)
        self._tasks.start_soon(peer.run, lambda message: None)
        return peer, theirs


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with anyio.create_task_group() as tasks:
        made = Wire(tasks)
        yield made
        for end in made.ends:
            await end.aclose()


async def _next(stream: MessageStream, kind: type) -> Any:
    """Return the next message of a kind; others are passed over."""
    with anyio.fail_after(5):
        while not isinstance(message := await stream.receive(), kind):
            pass
        return message


async def _nothing(stream: MessageStream) -> bool:
    with anyio.move_on_after(0.05):
        await stream.receive()
        return False
    return True


def _hub(wire: Wire) -> tuple[Hub, MessageStream, MessageStream]:
    hub = Hub("g", "staged", 1)
    rank, rank_end = wire.peer("rank 0")
    leader, leader_end = wire.peer("the leader")
    hub.rank_joined(RankHello("g", 0, 1, "staged", "handle"), MANIFEST, rank)
    hub.speak(leader)
    return hub, rank_end, leader_end


async def test_a_hub_that_has_not_committed_forgets_and_says_so(wire: Wire) -> None:
    hub, rank, leader = _hub(wire)
    hub.on_leader(EXPECT)
    hub.on_leader(DISCARD)
    hub.on_rank(0, Arrived(1))

    assert Discarded(1) == await _next(leader, Discarded)
    assert DISCARD == await _next(rank, Discard)
    assert await _nothing(rank)


async def test_a_hub_that_has_committed_ignores_a_discard(wire: Wire) -> None:
    hub, rank, leader = _hub(wire)
    hub.on_leader(EXPECT)
    hub.on_rank(0, Arrived(1))
    hub.on_leader(DISCARD)

    assert Delivered(1) == await _next(leader, Delivered)
    assert Commit(1) == await _next(rank, Commit)
    assert await _nothing(leader)


async def _moving(
    wire: Wire,
) -> tuple[Pushes, Any, MessageStream, MessageStream]:
    """A push that is on its way from one trainer rank to one replica."""

    def after(seconds: float, act: Callable[[], None]) -> anyio.CancelScope:
        return anyio.CancelScope()

    members = Members(1, after)
    pushes = Pushes(members, after)
    trainer, trainer_end = wire.peer("trainer rank 0")
    peer, replica_end = wire.peer("replica 'g'")
    members.trainer_joined(0, 1, trainer)
    hello = ReplicaHello("g", "staged", 1)
    replica = members.replica_joined(hello, held(MANIFEST), peer)
    members.linked(0, replica.link)
    members.linked(None, replica.link)
    members.credited(replica, 0)
    request = PushRequest(1, Terms(), 5.0, MANIFEST.digest, MANIFEST)
    pushes.request(0, request)
    agree = await _next(trainer_end, Agree)
    for rank in (0, None):
        members.agreed(replica, rank, Agreed(replica.link, agree.number, DIGEST))
    await _next(trainer_end, Put)
    pushes.cancel(0, 1)
    await _next(trainer_end, Stop)
    pushes.put_ended(0, PutEnded(replica.link, 1, (2,)))
    assert Discard(1, ((2,),)) == await _next(replica_end, Discard)
    return pushes, replica, trainer_end, replica_end


async def test_a_push_does_not_end_before_the_replica_has_answered(wire: Wire) -> None:
    pushes, replica, trainer, _ = await _moving(wire)
    waits = await _nothing(trainer)
    pushes.discarded(replica, 1)
    ended = await _next(trainer, PushEnded)

    assert waits
    assert ("failed", 0) == (ended.report.replicas["g"].status, pushes.last_version)


async def test_a_replica_that_was_faster_takes_the_number(wire: Wire) -> None:
    pushes, replica, trainer, _ = await _moving(wire)
    pushes.delivered(replica, 1)
    ended = await _next(trainer, PushEnded)

    assert ("delivered", 1) == (ended.report.replicas["g"].status, pushes.last_version)
    assert "cancelled" in ended.fault.message
