"""Who gets a name that is taken: decided by the answer of its owner, or by its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from tests.pure.leading import Leader, Line, MakePeer, held, manifest
from weightsync.counting import Held
from weightsync.elastic import Present, RollCall
from weightsync.errors import PeerError, PlanError
from weightsync.hellos import RankHello, ReplicaHello
from weightsync.hub import Hub
from weightsync.membership import Happened
from weightsync.messages import Accepted, DropLink, Ended, Fault

if TYPE_CHECKING:
    from weightsync.pool import Replica

pytestmark = pytest.mark.anyio

TAKEN: Final = Fault.of(PlanError("there is a replica 'g' in the pool already"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Comer(NamedTuple):
    """A replica that came, and what it is told."""

    replica: Replica
    line: Line


class Pool(Leader):
    """A leader to which several processes come as replica "g"."""

    def come(self, instance: str, last: Held | None = None) -> Comer:
        peer, line = self._peer(f"{instance} as replica 'g'")
        hello = ReplicaHello("g", "staged", 1, last=last, instance=instance)
        replica = self.members.replica_joined(hello, held(manifest("w")), peer)
        return Comer(replica, line)

    def answer_to(self, call: RollCall, owner: Comer) -> None:
        self.members.succession.present(owner.replica, call.number)

    @property
    def inside(self) -> list[Replica]:
        return list(self.members.replicas.values())

    async def events(self) -> list[tuple[str, str]]:
        told = [m for m in await self.trainers[1].all() if isinstance(m, Happened)]
        found = [event for happened in told for event in happened.events]
        return [(e.kind, e.reason) for e in found if e.role == "replica"]


@pytest.fixture
async def pool(peer: MakePeer) -> Pool:
    return Pool(peer)


async def test_an_owner_that_answers_keeps_its_name(pool: Pool) -> None:
    owner, comer = pool.come("a"), pool.come("b")
    call = await owner.line.next(RollCall)
    before = await comer.line.all()
    pool.answer_to(call, owner)
    told = await comer.line.all()
    inside = pool.inside
    pool.members.drop(comer.replica, PeerError("it closed the connection"))

    assert [] == before
    assert [Ended(TAKEN)] == told
    assert [owner.replica] == inside == pool.inside
    assert [] == await pool.events()


async def test_an_owner_that_is_out_leaves_its_name_to_who_came_first(
    pool: Pool,
) -> None:
    owner, first, second = pool.come("a"), pool.come("b"), pool.come("c")
    pool.members.drop(owner.replica, PeerError("it died"))
    accepted, call = await first.line.all()
    inside = pool.inside
    pool.answer_to(call, first)

    assert (Accepted, RollCall) == (type(accepted), type(call))
    assert [first.replica] == inside == pool.inside
    assert [Ended(TAKEN)] == await second.line.all()
    assert [("failed", "it died")] == await pool.events()


async def test_what_an_owner_said_before_it_was_asked_is_no_answer(
    pool: Pool,
) -> None:
    owner, first = pool.come("a"), pool.come("b")
    early = await owner.line.next(RollCall)
    second = pool.come("c")
    pool.answer_to(early, owner)
    refused = await first.line.all()
    pool.members.drop(owner.replica, PeerError("it died"))

    assert [Ended(TAKEN)] == refused
    assert [second.replica] == pool.inside


async def test_who_waits_for_a_name_and_goes_is_not_missed(pool: Pool) -> None:
    owner, comer = pool.come("a"), pool.come("b")
    await pool.clear()
    for _ in range(2):  # it says so, and then its channel ends
        pool.members.drop(comer.replica, PeerError("it left"), clean=True)
    told = await pool.trainers[1].all()
    pool.members.drop(owner.replica, PeerError("it died"))

    assert [] == told
    assert [] == pool.inside


async def test_the_end_of_a_pool_is_told_to_who_waits_for_a_name(pool: Pool) -> None:
    owner, comer = pool.come("a"), pool.come("b")
    fault = Fault.of(PeerError("trainer rank 1 failed: it died"))
    pool.members.trainer_lost(1, PeerError("it died"), clean=False)
    pool.members.drop(comer.replica, PeerError("it closed the connection"))
    dropped = [m for m in await pool.trainers[0].all() if isinstance(m, DropLink)]

    assert Ended(fault) == await owner.line.next(Ended)
    assert [Ended(fault)] == await comer.line.all()
    assert [owner.replica.link] == [message.link for message in dropped]


async def test_who_waited_and_does_not_fit_is_told_why_and_the_next_one_comes(
    peer: MakePeer,
) -> None:
    pool = Pool(peer, epoch=2)
    owner = pool.come("a")
    later, next_one = pool.come("b", Held(3, 1)), pool.come("c")
    pool.members.drop(owner.replica, PeerError("it died"))
    told = await later.line.next(Ended)

    assert "later than epoch 2 of the trainers" in told.fault.message
    assert [next_one.replica] == pool.inside


async def test_a_hub_answers_for_all_of_its_ranks(peer: MakePeer) -> None:
    hub = Hub("g", "staged", 2)
    leader, line = peer("the leader")
    ranks: list[Line] = []
    for rank in (0, 1):
        joined, said = peer(f"rank {rank}")
        hub.rank_joined(RankHello("g", rank, 2, "staged", "h"), manifest("w"), joined)
        ranks.append(said)
    hub.speak(leader)
    answers: list[Any] = []
    for message in (RollCall(1), RollCall(2)):
        hub.on_leader(message)
    asked = [await said.next(RollCall) for said in ranks]
    await line.all()
    for rank, number in ((0, 1), (0, 2), (1, 1), (1, 2), (1, 2)):
        hub.on_rank(rank, Present(number))
        answers.append(await line.all())

    assert [RollCall(1)] * 2 == asked
    assert [[], [], [Present(1)], [Present(2)], []] == answers
