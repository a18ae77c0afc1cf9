"""What the leader asks before the first transfer of a layout."""

from __future__ import annotations

import pytest

from tests.pure.leading import Leader, MakePeer, manifest
from weightsync.errors import PeerError
from weightsync.hellos import RankHello
from weightsync.hub import Hub
from weightsync.messages import (
    Accepted,
    Agree,
    Agreed,
    DropLink,
    Ended,
    Expect,
    Fault,
    Layout,
    PushEnded,
    Put,
    PutEnded,
    Terms,
    Verified,
    Verify,
)
from weightsync.remembered import REMEMBERED

pytestmark = pytest.mark.anyio

ONE, TWO, THREE = (bytes([0] * 15 + [value]) for value in (1, 2, 3))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def leader(peer: MakePeer) -> Leader:  # in the loop, where streams are made
    return Leader(peer)


async def test_nothing_is_put_before_both_sides_have_planned_the_same(
    leader: Leader,
) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    await leader.clear()
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    leader.answer(replica, asked, ONE, TWO)
    before = [await leader.trainers[0].kinds(), await leader.lines["g"].kinds()]
    leader.members.agreed(replica, None, Agreed(replica.link, asked.number, THREE))
    after = [await leader.trainers[0].kinds(), await leader.lines["g"].kinds()]

    assert [[Layout, Agree], []] == before
    assert [[Put], [Expect]] == after


async def test_sides_that_plan_differently_are_an_error_and_nothing_is_put(
    leader: Leader,
) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    await leader.clear()
    leader.answer(replica, asked, ONE, TWO, TWO)
    told = await leader.trainers[1].all()
    ended = next(message for message in told if isinstance(message, PushEnded))
    removed = await leader.lines["g"].next(Ended)

    assert "ProtocolError" == ended.fault.kind
    assert "'g': its plan differs" in ended.fault.message
    assert "its plan differs" in removed.fault.message
    assert ended.report.replicas["g"].removed
    assert {DropLink, PushEnded} < {type(message) for message in told}
    assert Put not in {type(message) for message in told}


async def test_replicas_agree_each_by_itself(leader: Leader) -> None:
    replicas = [leader.join(name) for name in ("fast", "slow", "wrong")]
    for replica in replicas:
        leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = [await leader.lines[replica.name].next(Agree) for replica in replicas]
    leader.answer(replicas[2], asked[2], ONE, TWO, ONE)
    leader.answer(replicas[1], asked[1], ONE)
    leader.answer(replicas[0], asked[0], ONE, TWO, THREE)
    moved = (await leader.lines["fast"].next(Expect)).version
    leader.deliver(replicas[0])
    await leader.clear()
    leader.timers[0]()
    ended = await leader.trainers[0].next(PushEnded)
    reasons = {name: ended.report.replicas[name].reason for name in ended.report.failed}

    assert 1 == moved
    assert ("fast",) == ended.report.delivered
    assert ended.fault is None
    assert ["slow", "wrong"] == sorted(reasons)
    assert "no plan from trainer rank 1 and the replica" in reasons["slow"]
    assert [True] * 2 == [ended.report.replicas[name].removed for name in reasons]


async def test_plans_of_trainers_that_come_late_serve_the_next_push(
    leader: Leader,
) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    leader.members.agreed(replica, None, Agreed(replica.link, asked.number, THREE))
    leader.timers[0]()
    failed = await leader.trainers[0].next(PushEnded)
    leader.push(manifest("w"))
    again = await leader.lines["g"].kinds()
    leader.answer(replica, asked, ONE, TWO)
    moved = await leader.lines["g"].kinds()

    assert "TimedOutError" == failed.fault.kind
    assert "no plan from trainer rank 0, 1 within" in failed.fault.message
    assert ([], [Expect]) == (again, moved)


async def test_a_push_is_cancelled_while_ranks_plan(leader: Leader) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    await leader.clear()
    leader.pushes.cancel(1, 1)
    leader.answer(replica, asked, ONE, TWO, THREE)
    told = await leader.trainers[0].all()

    assert [PushEnded] == [type(message) for message in told]
    assert "ClosedError" == told[0].fault.kind
    assert 0 == replica.credit


async def test_a_rank_that_cannot_plan_fails_its_replica_only(leader: Leader) -> None:
    replicas = [leader.join(name) for name in ("good", "bad")]
    for replica in replicas:
        leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = [await leader.lines[replica.name].next(Agree) for replica in replicas]
    fault = Fault("PeerError", "MemoryError: none left")
    message = Agreed(replicas[1].link, asked[1].number, bytes(16), fault)
    leader.members.agreed(replicas[1], 1, message)
    leader.timers.pop()()
    leader.answer(replicas[0], asked[0], ONE, TWO, THREE)
    leader.deliver(replicas[0])
    ended = await leader.trainers[0].next(PushEnded)

    assert ("good",) == ended.report.delivered
    assert "trainer rank 1: MemoryError" in ended.report.failed["bad"]


@pytest.mark.parametrize("step", ["plan", "put"])
async def test_who_leaves_is_skipped_though_trainers_find_it_gone_first(
    leader: Leader, step: str
) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    gone = Fault("PeerError", "generator rank 0 (process 7) left the group")
    if step == "plan":
        message = Agreed(replica.link, asked.number, bytes(16), gone)
        leader.members.agreed(replica, 0, message)
    else:
        leader.answer(replica, asked, ONE, TWO, THREE)
        leader.pushes.put_ended(0, PutEnded(replica.link, 1, (), gone))
    leader.members.drop(replica, PeerError("it left"), clean=True)
    leader.timers.pop()()
    ended = await leader.trainers[0].next(PushEnded)

    assert ended.fault is None
    assert ("g",) == ended.report.skipped


async def test_a_replica_that_goes_while_ranks_plan_is_reported(leader: Leader) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    leader.answer(replica, asked, ONE, TWO)
    leader.members.drop(replica, PeerError("it broke"))
    ended = await leader.trainers[0].next(PushEnded)

    assert {"g": "it broke"} == ended.report.failed
    assert {} == leader.members.replicas


async def test_a_busy_replica_that_is_skipped_is_not_asked(leader: Leader) -> None:
    leader.join("g")
    await leader.clear()
    leader.push(manifest("w"), Terms(on_busy="skip"))
    told = await leader.lines["g"].kinds()
    ended = await leader.trainers[0].next(PushEnded)

    assert [] == told
    assert ("g",) == ended.report.skipped


async def test_the_thousandth_push_sends_neither_manifests_nor_questions(
    leader: Leader,
) -> None:
    replica = leader.join("g")
    leader.members.credited(replica, 0)
    leader.push(manifest("w"))
    asked = await leader.lines["g"].next(Agree)
    leader.answer(replica, asked, ONE, TWO, THREE)
    leader.deliver(replica)
    await leader.clear()
    for _ in range(999):
        leader.members.credited(replica, 0)
        leader.push(manifest("w"))
        leader.deliver(replica)
    told = [await line.kinds() for line in (*leader.trainers, leader.lines["g"])]

    assert [[Put, PushEnded] * 999, [Put, PushEnded] * 999, [Expect] * 999] == told


async def test_a_layout_that_was_forgotten_is_told_and_agreed_again(
    leader: Leader,
) -> None:
    names = [f"w{index}" for index in range(REMEMBERED + 1)]
    replica = leader.join("g", names=names)
    await leader.clear()
    asked: list[list[type]] = []
    for name in [*names, names[-1], names[0]]:
        leader.members.credited(replica, 0)
        leader.push(manifest(name), Terms(partial=True))
        told = await leader.lines["g"].all()
        asked.append([type(message) for message in told])
        for message in told:
            if isinstance(message, Agree):
                leader.answer(replica, message, ONE, TWO, THREE)
        leader.deliver(replica)
        await leader.clear()

    new = [Layout, Agree]
    assert [*[new] * len(names), [Expect], new] == asked


async def test_a_late_replica_plans_before_the_next_push(leader: Leader) -> None:
    first = leader.join("first")
    leader.members.credited(first, 0)
    leader.push(manifest("w"))
    leader.answer(first, await leader.lines["first"].next(Agree), ONE, TWO, THREE)
    leader.deliver(first)
    await leader.clear()
    late = leader.join("late")
    asked = await leader.lines["late"].all()
    leader.answer(late, asked[-1], ONE, TWO, THREE)
    for replica in (first, late):
        leader.members.credited(replica, 0)
    await leader.clear()
    leader.push(manifest("w"))
    told = [await line.kinds() for line in (leader.trainers[0], *leader.lines.values())]

    assert [Accepted, Layout, Agree] == [type(message) for message in asked]
    assert [[Put, Put], [Expect], [Expect]] == told


async def test_a_late_replica_that_does_not_fit_plans_nothing(leader: Leader) -> None:
    leader.members.credited(leader.join("first"), 0)
    leader.push(manifest("w"))
    leader.join("late", names=("w", "v"))
    told = await leader.lines["late"].kinds()
    leader.timers[0]()
    leader.push(manifest("w"))
    ended = [m for m in await leader.trainers[0].all() if isinstance(m, PushEnded)]

    assert [Accepted] == told
    assert ["TimedOutError", "PlanError"] == [e.fault.kind for e in ended if e.fault]


async def test_replicas_that_hold_the_same_are_checked_once(leader: Leader) -> None:
    held = [("w", "v"), ("w", "v"), ("w", "v", "x")]
    replicas = [leader.join(str(n), names=names) for n, names in enumerate(held)]
    leader.push(manifest("w", "v"), Terms(partial=True))
    fits = [next(iter(replica.fits.values())) for replica in replicas]
    leader.timers[0]()
    leader.join("odd", names=("w", "q"))
    leader.push(manifest("w", "v"), Terms(partial=True))
    ended = [m for m in await leader.trainers[0].all() if isinstance(m, PushEnded)]

    assert fits[0] is fits[1]
    assert fits[0] is not fits[2]
    assert "PlanError" == ended[-1].fault.kind


async def test_a_layout_is_put_together_once(leader: Leader) -> None:
    pushed = [manifest("w") for _ in range(2)]
    first = leader.join("first")
    leader.members.credited(first, 0)
    leader.push(pushed[0])
    told = [await leader.lines["first"].next(Layout)]
    leader.answer(first, await leader.lines["first"].next(Agree), ONE, TWO, THREE)
    leader.deliver(first)
    leader.join("late")
    leader.push(pushed[1])
    told.append(await leader.lines["late"].next(Layout))

    assert told[0] is told[1]


async def test_nothing_is_planned_before_values_are_compared(leader: Leader) -> None:
    leader.members.credited(leader.join("g"), 0)
    await leader.clear()
    leader.push(manifest("w"), Terms(check_replicas=True))
    asked = [await line.all() for line in leader.trainers]
    for rank in range(2):
        leader.pushes.verified(rank, Verified(1, (ONE,)))
    told = await leader.lines["g"].kinds()

    assert [[Verify(1, (0,))]] * 2 == asked
    assert [Layout, Agree] == told


async def test_a_rank_that_compares_nothing_times_the_push_out(leader: Leader) -> None:
    leader.members.credited(leader.join("g"), 0)
    await leader.clear()
    leader.push(manifest("w"), Terms(check_replicas=True))
    leader.pushes.verified(0, Verified(1, (ONE,)))
    leader.timers[0]()
    ended = await leader.trainers[1].next(PushEnded)

    assert "TimedOutError" == ended.fault.kind
    assert "trainer rank 1 did not compare its tensors" in ended.fault.message
    assert [] == await leader.lines["g"].all()


async def test_a_hub_answers_once_with_the_sum_of_its_ranks(peer: MakePeer) -> None:
    hub = Hub("g", "staged", 2)
    for rank in range(2):
        hello = RankHello("g", rank, 2, "staged", "handle")
        hub.rank_joined(hello, manifest("w"), peer(f"rank {rank}")[0])
    leader, line = peer("the leader")
    hub.speak(leader)
    hub.on_leader(Agree(1, 7, ONE))
    hub.on_rank(0, Agreed(1, 7, ONE))
    early = await line.kinds()
    hub.on_rank(1, Agreed(1, 7, TWO))
    answered = await line.all()
    hub.on_leader(Agree(1, 8, ONE))
    hub.on_rank(1, Agreed(1, 8, bytes(16), Fault("PlanError", "no")))
    hub.on_rank(0, Agreed(1, 8, ONE))
    refused = await line.all()

    assert Agreed not in early
    assert [Agreed(1, 7, THREE)] == answered
    assert [Fault("PlanError", "rank 1: no")] == [answer.fault for answer in refused]
