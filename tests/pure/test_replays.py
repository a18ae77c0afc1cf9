"""What the leader lets trainer ranks keep, whom it replays that to, and when not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.pure.leading import Leader, MakePeer, manifest
from weightsync.elastic import FIRST_REPLAY, Kept
from weightsync.errors import PeerError
from weightsync.membership import Happened
from weightsync.messages import (
    Agree,
    Discard,
    Fault,
    PushEnded,
    Put,
    PutEnded,
    Stop,
    Terms,
)

if TYPE_CHECKING:
    from weightsync.replica import Replica

pytestmark = pytest.mark.anyio

DIGESTS = (bytes(15) + b"\1", bytes(15) + b"\1", bytes(15) + b"\2")
MODEL = manifest("w", "b")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def leader(peer: MakePeer) -> Leader:  # in the loop, where streams are made
    return Leader(peer, replay=True)


async def agree(leader: Leader, replica: Replica) -> None:
    """Let all ranks of a link plan alike, whatever they were asked to plan."""
    asked = [m for m in await leader.lines[replica.name].all() if isinstance(m, Agree)]
    for agree in asked:
        leader.answer(replica, agree, *DIGESTS)


def keep(leader: Leader, push: int, *ranks: int) -> None:
    for rank in ranks:
        leader.pushes.kept(rank, Kept(push))


async def delivered(leader: Leader, version: int = 3) -> Replica:
    """A replica that holds the version of push 1, which the ranks do not keep yet."""
    replica = leader.join("old", names=("w", "b"))
    leader.members.credited(replica, 0)
    leader.push(MODEL, Terms(version=version))
    await agree(leader, replica)
    leader.deliver(replica)
    return replica


async def joined(leader: Leader, name: str = "new") -> Replica:
    """A replica that has just come, and may be put to."""
    replica = leader.join(name, names=("w", "b"))
    leader.members.credited(replica, 0)
    return replica


async def replaying(leader: Leader) -> Replica:
    """A replica to which version 3 is on its way."""
    await delivered(leader)
    keep(leader, 1, 0, 1)
    replica = await joined(leader)
    await agree(leader, replica)
    await leader.trainers[0].next(Put)
    return replica


async def test_a_push_says_what_to_keep_and_only_if_it_was_delivered(
    leader: Leader,
) -> None:
    await delivered(leader)
    first = await leader.trainers[1].next(PushEnded)
    leader.push(MODEL, Terms(version=4, on_busy="skip"))
    second = await leader.trainers[1].next(PushEnded)

    assert ("all", "no") == (first.keep, second.keep)
    assert ("old",) == second.report.skipped


async def test_what_is_kept_is_replayed_when_every_rank_keeps_it(
    leader: Leader,
) -> None:
    await delivered(leader)
    replica = await joined(leader)
    await agree(leader, replica)
    await leader.clear()
    keep(leader, 1, 0)
    nothing = await leader.lines["new"].kinds()
    keep(leader, 1, 1)
    put = await leader.trainers[1].next(Put)
    leader.deliver(replica)
    told = await leader.trainers[0].all()

    assert [] == nothing
    assert (replica.link, 3, True) == (put.link, put.version, put.push > FIRST_REPLAY)
    assert 3 == replica.version
    assert Happened not in {type(message) for message in told}


async def test_a_push_takes_the_slot_back_from_a_replay(leader: Leader) -> None:
    replica = await replaying(leader)
    await leader.clear()
    leader.push(MODEL, Terms(version=4, on_busy="skip"))
    stop = await leader.trainers[0].next(Stop)
    for rank in range(2):
        leader.pushes.put_ended(rank, PutEnded(replica.link, replica.sequence, (1,)))
    discard = await leader.lines["new"].next(Discard)
    leader.pushes.discarded(replica, replica.sequence)
    waiting = await leader.trainers[0].kinds()
    leader.members.credited(replica, 0)
    put = await leader.trainers[0].next(Put)
    leader.deliver(replica)
    ended = await leader.trainers[0].next(PushEnded)

    assert (replica.link, 1) == (stop.link, stop.sequence)
    assert 1 == discard.sequence
    assert PushEnded not in waiting
    assert (2, 2, 4) == (put.push, put.sequence, put.version)
    assert {"old": "skipped", "new": "delivered"} == {
        name: report.status for name, report in ended.report.replicas.items()
    }


async def test_a_replica_that_does_not_open_the_slot_again_is_busy(
    leader: Leader,
) -> None:
    replica = await replaying(leader)
    leader.push(MODEL, Terms(version=4, on_busy="skip"))
    for rank in range(2):
        leader.pushes.put_ended(rank, PutEnded(replica.link, replica.sequence, (1,)))
    leader.pushes.discarded(replica, replica.sequence)
    await leader.clear()
    for expire in leader.timers[2:]:  # those before are of the pushes themselves
        expire()
    ended = await leader.trainers[0].next(PushEnded)

    assert ("old", "new") == ended.report.skipped


async def test_a_replay_that_was_faster_counts_and_leaves_the_replica_busy(
    leader: Leader,
) -> None:
    replica = await replaying(leader)
    await leader.clear()
    leader.push(MODEL, Terms(version=4, on_busy="skip"))
    leader.deliver(replica)
    ended = await leader.trainers[0].next(PushEnded)

    assert 3 == replica.version
    assert ("old", "new") == ended.report.skipped


async def test_a_replica_whose_push_failed_is_replayed_to_again(
    leader: Leader,
) -> None:
    replica = await replaying(leader)
    leader.push(MODEL, Terms(version=4))
    for rank in range(2):
        leader.pushes.put_ended(rank, PutEnded(replica.link, replica.sequence, (1,)))
    leader.pushes.discarded(replica, replica.sequence)
    leader.pushes.cancel(0, 2)
    ended = await leader.trainers[0].next(PushEnded)
    while ended.push != 2:
        ended = await leader.trainers[0].next(PushEnded)
    leader.members.credited(replica, 0)
    put = await leader.trainers[0].next(Put)

    assert "no" == ended.keep
    assert (3, True) == (put.version, put.push > FIRST_REPLAY)


async def test_a_push_that_succeeds_ends_the_replays_that_read_what_it_overwrites(
    leader: Leader,
) -> None:
    old = await delivered(leader)
    keep(leader, 1, 0, 1)
    leader.members.credited(old, 0)
    leader.push(MODEL, Terms(version=4))
    new = await joined(leader)  # while the push is under way
    await agree(leader, new)
    await leader.clear()
    leader.deliver(old)
    kinds = [type(message) for message in await leader.trainers[0].all()]
    for rank in range(2):
        leader.pushes.put_ended(rank, PutEnded(new.link, 1, (1,)))
    leader.pushes.discarded(new, 1)
    leader.members.credited(new, 0)
    before = await leader.trainers[0].kinds()
    keep(leader, 2, 0, 1)
    put = await leader.trainers[0].next(Put)

    assert kinds.index(Stop) < kinds.index(PushEnded)
    assert Put not in before
    assert (new.link, 4) == (put.link, put.version)


async def test_what_a_rank_has_not_kept_is_never_replayed(leader: Leader) -> None:
    old = await delivered(leader)
    keep(leader, 1, 0, 1)
    leader.members.credited(old, 0)
    leader.push(MODEL, Terms(version=4))
    leader.deliver(old)
    keep(leader, 1, 0, 1)  # late words for a version that is gone
    keep(leader, 2, 1)
    await leader.clear()
    await agree(leader, await joined(leader))

    assert Put not in await leader.trainers[0].kinds()


async def test_parts_go_into_what_is_kept(leader: Leader) -> None:
    old = await delivered(leader)
    keep(leader, 1, 0, 1)
    leader.members.credited(old, 0)
    await leader.clear()
    leader.push(manifest("b"), Terms(version=4, partial=True))
    await agree(leader, old)
    leader.deliver(old)
    ended = await leader.trainers[0].next(PushEnded)
    await leader.clear()
    keep(leader, 2, 0, 1)
    new = await joined(leader)
    await agree(leader, new)  # what was pushed last
    await agree(leader, new)  # what is kept
    put = await leader.trainers[0].next(Put)

    assert "parts" == ended.keep
    assert 4 == put.version


async def test_parts_after_a_version_that_was_not_kept_keep_nothing(
    leader: Leader,
) -> None:
    old = await delivered(leader)
    keep(leader, 1, 0)
    leader.members.credited(old, 0)
    await leader.clear()
    leader.push(manifest("b"), Terms(version=4, partial=True))
    await agree(leader, old)
    leader.deliver(old)
    ended = await leader.trainers[0].next(PushEnded)

    assert "no" == ended.keep


async def test_without_replay_nothing_is_kept(peer: MakePeer) -> None:
    leader = Leader(peer)
    await delivered(leader)
    ended = await leader.trainers[0].next(PushEnded)
    keep(leader, 1, 0, 1)
    await leader.clear()
    await agree(leader, await joined(leader))

    assert "no" == ended.keep
    assert Put not in await leader.trainers[0].kinds()


async def test_a_push_that_follows_a_put_that_failed_waits_for_its_replica_to_go(
    leader: Leader,
) -> None:
    replica = await replaying(leader)
    lost = Fault.of(PeerError("generator rank 0 is gone"))
    sequence = replica.sequence
    leader.pushes.put_ended(0, PutEnded(replica.link, sequence, (), lost))
    leader.pushes.put_ended(1, PutEnded(replica.link, sequence, (1,)))
    drop = leader.timers[-1]
    await leader.clear()
    leader.push(MODEL, Terms(version=4, on_busy="skip"))
    before = await leader.trainers[0].kinds()
    drop()
    ended = await leader.trainers[0].next(PushEnded)

    assert PushEnded not in before
    assert ("failed", True) == (
        ended.report.replicas["new"].status,
        ended.report.replicas["new"].removed,
    )
