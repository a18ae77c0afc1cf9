"""What went wrong in the decisions of a pool once, each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.pure.leading import held
from tests.pure.pool_network import Clock, Process, Wire, connect
from tests.pure.pool_trainers import ANSWER, NAMES, manifest
from tests.pure.pool_world import SimulatedLeader
from weightsync.agreement import Agreement
from weightsync.engine import ShmEngine
from weightsync.errors import PeerError
from weightsync.hellos import ReplicaHello
from weightsync.link import Link
from weightsync.messages import (
    Agree,
    Agreed,
    Discard,
    Fault,
    FormLink,
    Layout,
    PushEnded,
    PushRequest,
    PutEnded,
    Terms,
    Verified,
)
from weightsync.plan import sum_of_digests
from weightsync.remembered import Remembered
from weightsync.together import Together

if TYPE_CHECKING:
    from weightsync.pool import Replica

HELD = manifest(*NAMES)


class Stage:
    """A leader of two trainer ranks and one replica, and what each is told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.leader = SimulatedLeader(2, self.clock)
        self._lines: list[Wire] = []
        for rank in range(2):
            self.leader.admit_trainer(rank, self._line())
        hello = ReplicaHello("x", "staged", 1)
        line = self._line()
        self.replica: Replica = self.leader.admit_replica(hello, held(HELD), line)
        for rank in (0, 1, None):
            self.leader.members.linked(rank, self.replica.link)
        self.leader.members.credited(self.replica, 0)

    def _line(self) -> Wire:
        mine, theirs = connect(Process("party"), Process("leader"))
        self._lines.append(mine)
        return theirs

    def told(self, number: int, kind: type) -> list[Any]:
        return [m for m in self._lines[number].inbox if isinstance(m, kind)]

    def push(self, *timeouts: float, terms: Terms | None = None) -> None:
        for rank, timeout in enumerate(timeouts):
            request = PushRequest(1, terms or Terms(), timeout, HELD.digest, HELD)
            self.leader.pushes.request(rank, request)

    def move(self) -> None:
        """Let all agree, so that the version is being put."""
        (asked,) = self.told(2, Agree)
        for rank in (0, 1, None):
            digest = sum_of_digests([ANSWER] * 2) if rank is None else ANSWER
            answer = Agreed(self.replica.link, asked.number, digest)
            self.leader.members.agreed(self.replica, rank, answer)

    def put_ended(self, rank: int, *signals: int, fault: Fault | None = None) -> None:
        ended = PutEnded(self.replica.link, 1, signals, fault)
        self.leader.pushes.put_ended(rank, ended)

    def pass_time(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while (timer := self.clock.next(until)) is not None:
            timer.act()

    def outcome(self, rank: int) -> PushEnded:
        (ended,) = self.told(rank, PushEnded)
        return ended


def test_a_push_that_is_given_up_while_a_rank_could_not_put_ends() -> None:
    stage = Stage()
    stage.push(5.0, 5.0)
    stage.move()
    stage.put_ended(0, fault=Fault("PeerError", "rank 0 left the group"))
    stage.leader.pushes.cancel(1, 1)
    stage.put_ended(1, 2)
    stage.pass_time(2.0)

    assert [] == stage.told(2, Discard)
    assert "rank 0 left" in stage.outcome(0).report.replicas["x"].reason
    assert stage.outcome(0).report.replicas["x"].removed


def test_a_rank_without_its_end_of_a_link_costs_the_replica_and_nothing_else() -> None:
    stage = Stage()
    stage.push(5.0, 5.0)
    stage.move()
    stage.leader.pushes.cancel(1, 1)
    stage.put_ended(1, 2)
    stage.put_ended(0)  # no signals, where the replica has one rank
    stage.pass_time(2.0)

    assert [] == stage.told(2, Discard)
    assert "its end of the link is gone" in stage.outcome(1).report.failed["x"]


def test_the_shortest_timeout_of_all_ranks_ends_a_push() -> None:
    stage = Stage()
    stage.push(60.0, 1.0)
    stage.pass_time(1.5)

    assert "TimedOutError" == stage.outcome(0).fault.kind
    assert "within 1.0 s" in stage.outcome(1).report.failed["x"]
    assert [] == stage.clock.pending


def test_who_dies_while_values_are_compared_has_failed() -> None:
    stage = Stage()
    stage.push(5.0, 5.0, terms=Terms(check_replicas=True))
    stage.leader.pushes.verified(0, Verified(1, (bytes(16),) * 3))
    stage.leader.members.drop(stage.replica, PeerError("it broke"))
    stage.leader.pushes.verified(1, Verified(1, (bytes(16),) * 3))
    found = stage.outcome(0).report

    assert {"x": "it broke"} == found.failed
    assert 0 <= found.seconds < 60
    assert 0 <= found.replicas["x"].seconds < 60


def test_of_two_that_die_while_values_are_compared_both_have_failed() -> None:
    stage = Stage()
    hello = ReplicaHello("y", "staged", 1)
    other = stage.leader.admit_replica(hello, held(HELD), stage._line())
    for rank in (0, 1, None):
        stage.leader.members.linked(rank, other.link)
    stage.push(5.0, 5.0, terms=Terms(check_replicas=True))
    stage.leader.members.drop(other, PeerError("it broke"))
    for rank in range(2):
        stage.leader.pushes.verified(rank, Verified(1, (bytes(16),) * 3))
    stage.pass_time(6.0)

    assert "it broke" == stage.outcome(0).report.failed["y"]


def test_an_agreement_counts_each_answer_once() -> None:
    agreement = Agreement(1, 2)
    for rank in (0, 0, 1):
        agreement.answer(rank, ANSWER)
    agreement.answer(None, sum_of_digests([ANSWER] * 2))

    assert agreement.complete
    assert agreement.difference is None


def test_what_forming_a_link_needed_is_not_kept() -> None:
    stage = Stage()
    hello = ReplicaHello("y", "staged", 1)
    other = stage.leader.admit_replica(hello, held(HELD), stage._line())
    for rank in range(2):
        stage.leader.members.offered(rank, other.link, f"handle {rank}")
    for rank in (0, 1, None):
        stage.leader.members.linked(rank, other.link)

    assert [FormLink] == [type(message) for message in stage.told(3, FormLink)]
    assert ({}, set()) == (other.offers, other.ready)
    assert [] == stage.clock.pending


def test_planning_does_not_change_which_layout_is_forgotten_first() -> None:
    pushed = [manifest(*NAMES[at:], *NAMES[:at]) for at in range(3)]
    layouts: Remembered[bytes, Layout] = Remembered()
    for one in pushed:
        layouts.put(one.digest, Layout(one.digest, Together.of([one])))
    link = Link(layouts, ShmEngine(), trainer=0)
    link._replica = (HELD,)
    link.plan(pushed[0].digest)
    link.abort()

    assert [one.digest for one in pushed] == list(layouts)
