"""A replica that joins plans before it is in the pool, so that no push waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.pure.leading import Leader, MakePeer, held, manifest
from weightsync.hellos import ReplicaHello
from weightsync.membership import Happened
from weightsync.messages import Agree, Ended, Expect, Pool, PushEnded
from weightsync.roster import membership

if TYPE_CHECKING:
    from weightsync.replica import Replica

pytestmark = pytest.mark.anyio

ONE, TWO, THREE = (bytes([0] * 15 + [value]) for value in (1, 2, 3))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def leader(peer: MakePeer) -> Leader:
    """A leader whose replica "first" was delivered a version."""
    leader = Leader(peer)
    first = leader.join("first")
    leader.members.credited(first, 0)
    leader.push(manifest("w"))
    leader.answer(first, await leader.lines["first"].next(Agree), ONE, TWO, THREE)
    leader.deliver(first)
    leader.members.credited(first, 0)
    await leader.clear()
    return leader


def _state(leader: Leader, replica: Replica) -> str:
    found = membership(leader.members, 0, replica.since).replicas
    return found[replica.name].state


async def test_a_push_does_not_wait_for_a_replica_that_plans(leader: Leader) -> None:
    first, late = leader.members.active[0], leader.join("late")
    asked = await leader.lines["late"].next(Agree)
    leader.members.credited(late, 0)
    leader.push(manifest("w"))
    leader.deliver(first)
    ended = await leader.trainers[0].next(PushEnded)
    before = _state(leader, late)
    leader.answer(late, asked, ONE, TWO, THREE)
    told = await leader.trainers[0].all()
    leader.members.credited(first, 0)
    leader.push(manifest("w"))
    expected = await leader.lines["late"].next(Expect)

    assert (("first",), {}) == (ended.report.delivered, ended.report.failed)
    assert ("joining", "active") == (before, _state(leader, late))
    assert [Happened, Pool] == [type(message) for message in told]
    assert ("first", "late") == told[1].replicas
    assert 3 == expected.version


async def test_a_replica_that_plans_otherwise_never_joins(leader: Leader) -> None:
    late = leader.join("late")
    asked = await leader.lines["late"].next(Agree)
    await leader.clear()
    leader.answer(late, asked, ONE, TWO, ONE)
    happened = await leader.trainers[0].next(Happened)
    ended = await leader.lines["late"].next(Ended)

    assert ["failed"] == [event.kind for event in happened.events]
    assert "its plan differs" in ended.fault.message
    assert ["first"] == [replica.name for replica in leader.members.active]


async def test_a_replica_that_never_plans_is_dropped_for_that(
    leader: Leader, peer: MakePeer
) -> None:
    late, line = peer("replica 'late'")
    hello = ReplicaHello("late", "staged", 1)
    replica = leader.members.replica_joined(hello, held(manifest("w")), late)
    for rank in range(2):
        leader.members.offered(rank, replica.link, f"handle {rank}")
    expire = leader.timers[-1]
    for rank in (0, 1, None):
        leader.members.linked(rank, replica.link)
    expire()
    ended = await line.next(Ended)

    assert "no plan from trainer rank 0, 1 and the replica in 300 s" in (
        ended.fault.message
    )
