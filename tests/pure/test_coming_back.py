"""What leader and hub decide about those who come back, and about later leaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.pure.leading import Leader, MakePeer, held, manifest
from weightsync.counting import Held
from weightsync.errors import FencedError, PeerError, PlanError
from weightsync.fencing import Fence
from weightsync.hellos import RankHello, ReplicaHello
from weightsync.hub import Hub
from weightsync.membership import Happened
from weightsync.messages import Agree, Ended, Expect, Fault, PushEnded, Terms
from weightsync.roster import membership

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def leader(peer: MakePeer) -> Leader:
    return Leader(peer)


def _hello(instance: str = "a", last: Held | None = None) -> ReplicaHello:
    return ReplicaHello(
        "g", "staged", 1, last=last, holds=last is not None, instance=instance
    )


async def test_a_replica_takes_the_place_of_its_former_self_only(
    leader: Leader, peer: MakePeer
) -> None:
    first, line = peer("replica 'g'")
    old = leader.members.replica_joined(_hello(), held(manifest("w")), first)
    other, refused = peer("another replica 'g'")
    leader.members.replica_joined(_hello("b"), held(manifest("w")), other)
    second, _ = peer("replica 'g'")
    new = leader.members.replica_joined(_hello(), held(manifest("w")), second)
    ended = await line.next(Ended)
    told = await refused.all()

    taken = Fault.of(PlanError("there is a replica 'g' in the pool already"))
    assert (True, False) == (old.gone, new.gone)
    assert "it joins again" in ended.fault.message
    assert [Ended(taken)] == told
    assert [new] == list(leader.members.replicas.values())


async def test_versions_count_on_from_what_a_replica_holds(
    leader: Leader, peer: MakePeer
) -> None:
    joined, line = peer("replica 'g'")
    hello = _hello(last=Held(2, 7))
    replica = leader.members.replica_joined(hello, held(manifest("w")), joined)
    for rank in (0, 1, None):
        leader.members.linked(rank, replica.link)
    found = membership(leader.members, leader.pushes.last_version, replica.since)
    leader.members.credited(replica, 0)
    leader.push(manifest("w"), Terms())
    leader.answer(replica, await line.next(Agree), bytes(16), bytes(16), bytes(16))
    expect = await line.next(Expect)
    leader.deliver(replica)
    report = (await leader.trainers[1].next(PushEnded)).report

    assert (7, 2) == (found.version, found.epoch)
    assert (7, 2) == (found.replicas["g"].version, found.replicas["g"].epoch)
    assert (8, 2) == (expect.version, expect.epoch)
    assert (8, 2) == (report.version, report.epoch)
    assert (8, 2) == (replica.version, replica.epoch)


async def test_a_hub_says_the_highest_version_of_its_ranks_and_whether_all_hold_it(
    peer: MakePeer,
) -> None:
    def hub(*ranks: tuple[Held | None, bool]) -> tuple[Held | None, bool]:
        made = Hub("g", "staged", len(ranks))
        for rank, (last, holds) in enumerate(ranks):
            hello = RankHello(
                "g", rank, len(ranks), "staged", "h", last=last, holds=holds
            )
            made.rank_joined(hello, manifest("w"), peer("rank")[0])
        return made.hello.last, made.hello.holds

    high, low = Held(1, 3), Held(0, 9)

    assert (high, True) == hub((high, True), (high, True))
    assert (high, False) == hub((high, True), (low, True))
    assert (high, False) == hub((None, False), (high, True))
    assert (high, False) == hub((high, True), (high, False))
    assert (None, False) == hub((None, False), (None, False))


async def test_a_patient_hub_forgets_a_rank_that_goes_before_it_is_introduced(
    peer: MakePeer,
) -> None:
    hub = Hub("g", "staged", 2, patient=True)
    hellos = [RankHello("g", rank, 2, "staged", f"h{rank}") for rank in (0, 1)]
    for hello in hellos:
        hub.rank_joined(hello, manifest("w"), peer("rank")[0])
    before = hub.hello
    hub.rank_lost(1, PeerError("killed"), clean=False)
    missing, complete, ended = hub.missing, hub.complete.is_set(), hub.ended
    other = RankHello("g", 1, 2, "staged", "other")
    hub.rank_joined(other, manifest("w"), peer("rank")[0])

    assert ([1], False, None) == (missing, complete, ended)
    assert before == hub.hello
    assert ("h0", "other") == hub.held.handles


async def test_a_hub_gives_way_to_another_unless_its_replica_is_introduced(
    peer: MakePeer,
) -> None:
    joined, line = peer("rank 0")
    waiting, introduced = Hub("g", "staged", 2), Hub("g", "staged", 1)
    hello = RankHello("g", 0, 2, "staged", "h")
    waiting.rank_joined(hello, manifest("w"), joined)
    alone = RankHello("g", 0, 1, "staged", "h")
    introduced.rank_joined(alone, manifest("w"), peer("rank 0")[0])
    introduced.speak(peer("the leader")[0])
    gave_way = [waiting.supersede(), waiting.supersede(), introduced.supersede()]
    ended = await line.next(Ended)

    assert [True, False, False] == gave_way
    assert ("FencedError", "another process has become rank 0 of replica 'g'") == (
        ended.fault.kind,
        ended.fault.message,
    )


async def test_a_push_that_fails_for_peers_waits_for_the_look_at_the_term(
    leader: Leader,
) -> None:
    held: list[Callable[[], None]] = []
    leader.members.assure = held.append
    leader.push(manifest("w"), Terms())  # which nobody receives
    early = await leader.trainers[0].kinds()
    fenced = Fence("job", 3, None).passed(4)
    assert fenced is not None
    leader.members.fail(fenced)
    held[0]()
    told = await leader.trainers[1].all()
    ends = [message for message in told if isinstance(message, PushEnded)]
    events = [message for message in told if isinstance(message, Happened)]

    message = (
        "other trainers have taken over job 'job': their term is 4, that of these is 3"
    )
    assert PushEnded not in early
    assert ["FencedError"] == [end.fault.kind for end in ends if end.fault]
    assert ("fenced", message) == (
        events[-1].events[0].kind,
        events[-1].events[0].reason,
    )
    assert isinstance(leader.members.error, FencedError)


async def test_a_term_that_is_not_later_fences_nobody() -> None:
    fence = Fence("job", 3, None)

    assert [None, None] == [fence.passed(2), fence.passed(3)]
    assert None is await fence.look()
