"""The pool is what is proposed and connected, whatever comes in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.leading import Leader, Line, held, manifest
from weightsync.admittance import Admittance, check_names
from weightsync.errors import PeerError, PlanError
from weightsync.hellos import ReplicaHello
from weightsync.membership import Happened, Proposal
from weightsync.messages import (
    DropLink,
    Ended,
    OfferLink,
    Pool,
)
from weightsync.peer import MessageStream, Peer, local_pair
from weightsync.roster import membership

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAMES = st.sampled_from(["a", "b", "c", "d"])
PROPOSALS = st.none() | st.lists(NAMES, unique=True).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "die"]), NAMES)
    | st.tuples(st.just("propose"), PROPOSALS),
    max_size=25,
)


def with_leader(play: Callable[[Leader], Awaitable[None]]) -> None:
    """Run with a leader in a loop of its own."""

    async def main() -> None:
        ends: list[MessageStream] = []
        async with anyio.create_task_group() as tasks:

            def make(name: str) -> tuple[Peer, Line]:
                mine, theirs = local_pair(name, "us")
                made, line = Peer(mine), Line(theirs)
                ends.append(theirs)
                tasks.start_soon(made.run, lambda message: None)
                tasks.start_soon(line.listen)
                return made, line

            await play(Leader(make))
            for end in ends:
                await end.aclose()

    anyio.run(main)


def come(leader: Leader, name: str) -> None:
    """Let a replica come, and form its link if the leader offers that."""
    peer, leader.lines[name] = leader._peer(f"replica {name!r}")
    hello = ReplicaHello(name, "staged", 1)
    leader.members.replica_joined(hello, held(manifest("w")), peer)
    form(leader)


def form(leader: Leader) -> None:
    """Form every link that was begun."""
    for replica in list(leader.members.replicas.values()):
        if not replica.waiting and not replica.active:
            for rank in (0, 1, None):
                leader.members.linked(rank, replica.link)


def replica_of(leader: Leader, name: str) -> Any:
    return {each.name: each for each in leader.members.replicas.values()}.get(name)


class Model:
    """What should be so."""

    def __init__(self, admit: str) -> None:
        self.proposed = None if admit == "all" else frozenset[str]()
        self.connected: set[str] = set()
        self.number = 0

    @property
    def pool(self) -> set[str]:
        if self.proposed is None:
            return self.connected
        return self.connected & self.proposed

    def step(self, leader: Leader, kind: str, what: Any) -> None:
        """Do the same in both; where somebody is out it is gone, and has to come."""
        if kind == "propose":
            leader.members.propose(what)
            form(leader)
            before, self.proposed = self.pool, None if what is None else frozenset(what)
            self.connected -= before - self.pool
            self.number += 1
        elif kind == "join" and what not in self.connected:
            come(leader, what)
            self.connected.add(what)
        elif kind != "join" and what in self.connected:
            replica = replica_of(leader, what)
            leader.members.drop(replica, PeerError(kind), clean=kind == "leave")
            self.connected.discard(what)


@settings(deadline=None, max_examples=60)
@given(admit=st.sampled_from(["all", "proposed"]), steps=STEPS)
def test_the_pool_is_what_is_proposed_and_connected(
    admit: Any, steps: list[tuple[str, Any]]
) -> None:
    async def play(leader: Leader) -> None:
        leader.members.admittance = Admittance(admit)
        model = Model(admit)
        for kind, what in steps:
            model.step(leader, kind, what)
            found = membership(leader.members, 0, 0.0)
            waiting = {n for n, r in found.replicas.items() if r.state == "waiting"}
            told = await leader.trainers[1].all()
            pools = [each.replicas for each in told if isinstance(each, Pool)]

            assert model.pool == set(found.active)
            assert model.connected - model.pool == waiting
            assert model.proposed == (found.proposal and set(found.proposal.names))
            assert not pools or set(pools[-1]) == model.pool
            assert model.number == leader.members.admittance.number

    with_leader(play)


def test_who_waits_is_not_linked_until_proposed() -> None:
    async def play(leader: Leader) -> None:
        leader.members.admittance = Admittance("proposed")
        come(leader, "a")
        before = await leader.trainers[0].all()
        leader.members.propose(("b", "a"))
        after = await leader.trainers[0].kinds()

        assert OfferLink not in {type(message) for message in before}
        assert [("waiting", "a")] == [
            (event.kind, event.name)
            for message in before
            if isinstance(message, Happened)
            for event in message.events
            if event.role == "replica"
        ]
        assert [OfferLink] == after

    with_leader(play)


def test_who_is_removed_hears_by_which_proposal_and_has_left() -> None:
    async def play(leader: Leader) -> None:
        come(leader, "a")
        leader.members.propose(None)
        await leader.clear()
        leader.members.propose(("b",))
        ended = await leader.lines["a"].next(Ended)
        told = await leader.trainers[0].all()
        (happened,) = [each for each in told if isinstance(each, Happened)]

        assert "PeerError" == ended.fault.kind
        assert (
            "replica 'a' was removed from the pool: proposal 2 does not name it"
            == ended.fault.message
        )
        assert ["replica 'a' left: proposal 2 does not name it"] == [
            str(event) for event in happened.events
        ]
        assert DropLink in {type(message) for message in told}

    with_leader(play)


def test_a_wrong_proposal_changes_nothing() -> None:
    admittance = Admittance()
    admittance.propose(("a",))
    for wrong in (("a", "a"), ("",), ("x" * 257,), (1,), "a"):
        with pytest.raises(PlanError):
            admittance.propose(wrong)  # type: ignore[arg-type] # on purpose

    assert Proposal(1, ("a",)) == admittance.in_force


def test_names_come_from_anything_that_can_be_iterated() -> None:
    assert ("a", "b") == check_names(name for name in "ab")
    assert ("x" * 256,) == check_names(["x" * 256])
    assert () == check_names([])
