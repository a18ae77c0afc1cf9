"""The decisions of a pool hold whatever is lost, late, reordered, frozen or dead."""

from __future__ import annotations

import sys
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.pure.pool_checks import (
    check_always,
    check_end,
    check_progress,
    check_reports,
    check_timers,
)
from tests.pure.pool_trainers import Asked
from tests.pure.pool_world import World
from weightsync import remembered
from weightsync.messages import Terms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.pure.pool_network import Process

PICK = st.integers(0, 999)
MODES = st.sampled_from(["staged", "staged", "swap", "inplace"])
TERMS = st.builds(
    Terms,
    version=st.sampled_from([None] * 5 + [40, 41]),
    on_busy=st.sampled_from(["wait", "wait", "skip"]),
    require=st.sampled_from(["any", "all"]),
    check_replicas=st.sampled_from([False, False, True]),
)
TIMEOUTS = (30.0, 5.0, 1.0)
ASKED = st.builds(
    Asked, TERMS, st.sampled_from(TIMEOUTS), st.integers(0, 2), st.just(False)
)
LENGTHS = st.sampled_from([0, 3, 10, 20, 40, 80])
HARM = (
    *("kill", "leave", "freeze", "freeze_for_a_lease"),
    *("break_channels", "make_faulty"),
)


@pytest.fixture(autouse=True)
def few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "REMEMBERED", 2)


class PoolMachine(RuleBasedStateMachine):
    """A job in which everything may happen, in every order."""

    @initialize(
        world_size=st.integers(1, 3),
        sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        modes=st.lists(MODES, min_size=3, max_size=3),
        mortal=st.sampled_from([False, False, False, True]),
    )
    def start(
        self, world_size: int, sizes: list[int], modes: list[str], mortal: bool
    ) -> None:
        self.world = World(world_size)
        self.mortal = mortal
        for name, size, mode in zip("xyz", sizes, modes, strict=False):
            self.world.join(name, mode, size)
        self.world.settle()
        for rank in self.world.ranks:
            rank.receive()

    def pick(self, number: int, found: Iterable[Any]) -> Any:
        found = list(found)
        return found[number % len(found)] if found else None

    # What the programs do

    @rule(asked=ASKED, number=PICK, length=LENGTHS)
    def push(self, asked: Asked, number: int, length: int) -> None:
        for trainer in self.world.trainers:
            if trainer.idle:
                same = self._as_others(len(trainer.calls), asked)
                patience = TIMEOUTS[number * trainer.rank % len(TIMEOUTS)]
                trainer.push(same._replace(timeout=min(patience, same.timeout)))
        self._go_on(number, length)

    @rule(several=st.lists(ASKED, min_size=1, max_size=6))
    def train(self, several: list[Asked]) -> None:
        for asked in several:
            self.push(asked, 0, 0)
            self._settle()
            self._receive_everywhere()
            self._settle()

    @rule(
        asked=ASKED,
        number=PICK,
        what=st.sampled_from(["same"] * 6 + ["other", "fault"]),
    )
    def push_on_one(self, asked: Asked, number: int, what: str) -> None:
        trainer = self.pick(number, (t for t in self.world.trainers if t.idle))
        if trainer is not None:
            same = self._as_others(len(trainer.calls), asked)
            same = asked if what == "other" else same
            trainer.push(same._replace(fault=what == "fault", timeout=asked.timeout))

    def _as_others(self, at: int, asked: Asked) -> Asked:
        """What another rank has called this push with already."""
        calls = [t.calls[at].asked for t in self.world.trainers if len(t.calls) > at]
        return calls[0]._replace(fault=False) if calls else asked

    @rule(number=PICK, length=LENGTHS, after=LENGTHS)
    def cancel(self, number: int, length: int, after: int) -> None:
        self._go_on(number, length)
        self.pick(number, self.world.trainers).cancel()
        self._go_on(number, after)

    @rule(name=st.sampled_from("xyz"), mode=MODES, size=st.integers(1, 2))
    def join(self, name: str, mode: str, size: int) -> None:
        if len(self.world.replicas) < 8:
            self.world.join(name, mode, size)

    @rule(number=PICK, length=LENGTHS)
    def receive_everywhere(self, number: int, length: int) -> None:
        self._receive_everywhere()
        self._go_on(number, length)

    def _receive_everywhere(self) -> None:
        for rank in self.world.ranks:
            if rank.runs and rank.error is None:
                rank.receive()

    @rule(number=PICK, again=st.booleans())
    def receive(self, number: int, again: bool) -> None:
        ranks = (r for r in self.world.ranks if r.runs and r.error is None)
        rank = self.pick(number, ranks)
        if rank is not None:
            rank.receive()
            if not again and rank.replica.mode == "inplace":
                rank.give_up_receiving()

    # What the network does

    @rule(number=PICK, length=LENGTHS)
    def go_on(self, number: int, length: int) -> None:
        self._go_on(number, length)

    def _go_on(self, number: int, length: int) -> None:
        order = Random(number)
        for _ in range(length):
            ready = self.world.ready()
            if ready:
                order.choice(ready)()

    @rule(receive=st.booleans())
    def settle(self, receive: bool) -> None:
        if receive:
            self._receive_everywhere()
        self._settle()

    def _settle(self) -> None:
        self.world.settle()
        check_progress(self.world)
        check_timers(self.world)

    @rule(seconds=st.sampled_from([0.3, 0.3, 1.0, 1.0, 2.1, 5.0, 30.0, 300.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(number=PICK)
    def hold(self, number: int) -> None:
        """Let what comes over a channel be late."""
        wire = self.pick(number, (w for w in self.world.wires if not w.local))
        if wire is not None:
            wire.held = True
            self._disturb(wire.process, wire.other.process)

    @rule()
    def let_go(self) -> None:
        for wire in self.world.wires:
            wire.held = False

    # What becomes of the parties

    @rule(what=st.sampled_from(HARM), number=PICK, keep=st.integers(0, 3))
    def harm_a_replica(self, what: str, number: int, keep: int) -> None:
        rank = self.pick(
            number, (r for r in self.world.ranks if r.alive and not r.left)
        )
        if rank is not None:
            self._disturb(rank)
            getattr(self, f"_{what}")(rank, keep)

    def _kill(self, process: Process, keep: int) -> None:
        process.kill(keep)

    def _leave(self, process: Any, keep: int) -> None:
        if process.runs:
            process.leave()

    def _freeze(self, process: Process, keep: int) -> None:
        process.frozen = not process.frozen

    def _freeze_for_a_lease(self, process: Process, keep: int) -> None:
        process.frozen = True
        for wire in process.wires:
            if not wire.local and wire.other.process.runs:
                wire.other.expire()

    def _break_channels(self, process: Process, keep: int) -> None:
        for wire in process.wires:
            if not wire.local:
                self._disturb(wire.other.process)
                wire.cut(keep)
                wire.other.cut(keep)

    def _make_faulty(self, process: Any, keep: int) -> None:
        """Let what it does next fail: forming, planning, or switching."""
        process.faulty = True

    @rule(number=PICK)
    def make_a_trainer_faulty(self, number: int) -> None:
        self.pick(number, self.world.trainers).faulty = True

    @precondition(lambda self: self.mortal)
    @rule(what=st.sampled_from(HARM[:4]), number=PICK, keep=st.integers(0, 3))
    def harm_a_trainer(self, what: str, number: int, keep: int) -> None:
        trainer = self.pick(number, self.world.trainers)
        spared = what != "kill" and trainer.rank == 0
        if trainer.alive and trainer.error is None and not spared:
            self._disturb(trainer)
            getattr(self, f"_{what}")(trainer, keep)

    def _disturb(self, *processes: Process) -> None:
        for process in processes:
            process.disturbed = True

    # What must be true

    @invariant()
    def nothing_is_wrong(self) -> None:
        check_always(self.world)

    def teardown(self) -> None:
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:
            return  # what failed is known already
        world = self.world
        self._settle()
        world.pass_time(400)  # whatever is held or frozen, pushes end
        self._end_what_is_stuck()
        self._settle()
        world.pass_time(400)
        self._call_what_others_have()
        check_always(world)
        check_reports(world)
        check_end(world)

    def _end_what_is_stuck(self) -> None:
        """Every lease of whoever is frozen ends, and nothing is held any more."""
        self.let_go()
        for process in self.world.processes:
            if process.frozen or (process.alive and getattr(process, "error", None)):
                process.kill(keep=0)

    def _call_what_others_have(self) -> None:
        world = self.world
        world.settle()
        for _ in range(20):
            most = max(len(trainer.calls) for trainer in world.trainers)
            for trainer in world.trainers:
                if trainer.idle and len(trainer.calls) < most:
                    trainer.push(self._as_others(len(trainer.calls), NOTHING))
            world.settle()
            world.pass_time(400)
            world.settle()


NOTHING = Asked(Terms(), 1.0, 0)


class TestPoolProperties(PoolMachine.TestCase):  # type: ignore[name-defined,misc] # made
    settings = settings(
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def test_who_was_given_up_does_not_wait_though_the_push_does_for_others() -> None:
    """One put fails at the moment at which the push times out: that of "x" only."""
    machine = PoolMachine()
    machine.start(1, [1, 1], ["staged"] * 3, mortal=False)
    machine.train([Asked(Terms(), 30.0, 0, False)])
    machine.make_a_trainer_faulty(0)
    machine.push(Asked(Terms(), 1.0, 0, False), 0, 0)
    machine.pass_time(1.0)
    machine.settle(receive=False)
    (round_,) = machine.world.leader.pushes._rounds.values()
    found = [transfer.report for transfer in round_.transfers.values()]

    assert [None, "failed"] == [report and report.status for report in found]
