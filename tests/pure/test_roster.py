"""What the leader tells of members that are on their way in, or out."""

from __future__ import annotations

import pytest

from tests.pure.leading import Leader, MakePeer, held, manifest
from weightsync.errors import PeerError
from weightsync.hellos import ReplicaHello
from weightsync.membership import Happened
from weightsync.messages import (
    Agree,
    Terms,
)
from weightsync.roster import membership

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def leader(peer: MakePeer) -> Leader:  # in the loop, where streams are made
    return Leader(peer)


async def test_a_replica_is_joining_until_its_link_is_formed(
    leader: Leader, peer: MakePeer
) -> None:
    hello = ReplicaHello("new", "swap", 2)
    new, _ = peer("replica 'new'")
    pair = held(manifest("w"), manifest("w"))
    replica = leader.members.replica_joined(hello, pair, new)
    joining = membership(leader.members, 0, replica.since + 2).replicas["new"]
    for rank in (0, 1, None):
        leader.members.linked(rank, replica.link)
    found = membership(leader.members, 0, replica.since + 3)
    active = found.replicas["new"]

    assert ("joining", 2, "swap", None, None, 2.0) == (
        joining.state,
        joining.ranks,
        joining.mode,
        joining.version,
        joining.push,
        joining.age,
    )
    assert ("active", 3.0) == (active.state, active.age)
    assert ("new",) == found.active
    assert None is found.version


async def test_a_push_that_fails_shows_until_the_next_one(peer: MakePeer) -> None:
    leader = Leader(peer, epoch=2)
    replica = leader.join("gen")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"), Terms(version=3))
    asked = await leader.lines["gen"].next(Agree)
    leader.answer(replica, asked, *(bytes([0] * 15 + [value]) for value in (1, 1, 2)))
    leader.deliver(replica)
    leader.push(manifest("w"), Terms(version=4))
    for expire in leader.timers:
        expire()
    found = membership(leader.members, 3, replica.since).replicas["gen"]

    assert (2, 3) == (found.epoch, found.version)
    assert found.push is not None
    assert (2, 4) == (found.push.epoch, found.push.version)
    assert "failed" == found.push.status
    assert "it opened no slot" in found.push.reason


async def test_a_replica_that_never_got_in_fails_without_having_joined(
    leader: Leader, peer: MakePeer
) -> None:
    await leader.clear()
    new, _ = peer("replica 'new'")
    hello = ReplicaHello("new", "staged", 1)
    replica = leader.members.replica_joined(hello, held(manifest("w")), new)
    leader.members.drop(replica, PeerError("no memory"))
    told = [await line.next(Happened) for line in leader.trainers]

    assert told[0] == told[1]
    assert ["replica 'new' failed: no memory"] == [str(e) for e in told[0].events]
    assert {} == membership(leader.members, 0, 0.0).replicas
