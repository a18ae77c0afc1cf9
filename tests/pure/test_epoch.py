"""Epochs: never readable and writable at once, and versions only increase."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from weightsync.epoch import Epochs, Mode
from weightsync.errors import EpochError


class EpochMachine(RuleBasedStateMachine):
    """Drives ``Epochs`` and models the memory that it guards.

    ``held`` is what each slot's bytes are: a version, or None for a mixture. Staged,
    the tensors are memory of their own, and ``tensors`` is what they hold.
    """

    @initialize(mode=st.sampled_from(Mode))
    def start(self, mode: Mode) -> None:
        self.epochs = Epochs(mode)
        self.held: list[int | None] = [0] * mode.slots
        self.tensors: int | None = 0
        self.newest = 0
        self.switching: int | None = None
        self.reported: list[int] = []

    @property
    def visible(self) -> int | None:
        """What a reader would find in the tensors now."""
        if self.epochs.mode is Mode.STAGED:
            return self.tensors
        return self.held[self.epochs.reading]

    @precondition(lambda self: self.epochs.free is not None)
    @rule()
    def expose(self) -> None:
        self.epochs.expose()

    @precondition(lambda self: self.epochs.exposed is not None)
    @rule()
    def put_something(self) -> None:
        self.held[self.epochs.exposed] = None

    @precondition(lambda self: self.epochs.exposed is not None)
    @rule(step=st.integers(1, 3))
    def arrive(self, step: int) -> None:
        self.newest += step
        self.held[self.epochs.exposed] = self.newest
        self.epochs.arrive(self.newest)

    @precondition(lambda self: self.epochs.exposed is not None)
    @rule()
    def give_a_push_up(self) -> None:
        self.held[self.epochs.exposed] = None
        self.epochs.conceal(written=True)

    @precondition(
        lambda self: (
            self.epochs.exposed is not None
            and self.held[self.epochs.exposed] is not None
        )
    )
    @rule()
    def withdraw_the_credit(self) -> None:
        self.epochs.conceal(written=False)

    @precondition(lambda self: self.epochs.pending is not None)
    @precondition(lambda self: not self.epochs.leases and not self.epochs.switching)
    @rule()
    def begin_switch(self) -> None:
        self.switching = self.epochs.begin_switch()
        if self.epochs.mode is Mode.STAGED:
            self.tensors = None

    @precondition(lambda self: self.epochs.switching)
    @rule()
    def end_switch(self) -> None:
        if self.epochs.mode is Mode.STAGED:
            self.tensors = self.held[self.switching]
        self.reported.append(self.epochs.end_switch())

    @precondition(lambda self: self.epochs.switching)
    @rule()
    def fail_switch(self) -> None:
        self.epochs.fail_switch()

        assert self.epochs.pending is None
        assert self.epochs.version is None

    @precondition(lambda self: self.epochs.readable)
    @rule()
    def acquire(self) -> None:
        version = self.epochs.acquire()

        assert self.epochs.version == version

    @precondition(lambda self: self.epochs.leases)
    @rule()
    def release(self) -> None:
        self.epochs.release()

    @rule()
    def what_is_not_allowed_raises_and_changes_nothing(self) -> None:
        epochs = self.epochs
        before = repr(epochs)
        forbidden = [
            (epochs.free is None, epochs.expose),
            (epochs.exposed is None, lambda: epochs.arrive(self.newest + 1)),
            (self.newest > 0, lambda: epochs.arrive(self.newest)),
            (epochs.exposed is None, lambda: epochs.conceal(written=True)),
            (epochs.pending is None or epochs.leases > 0, epochs.begin_switch),
            (not epochs.switching, epochs.end_switch),
            (not epochs.readable, epochs.acquire),
            (epochs.leases == 0, epochs.release),
        ]
        for applies, call in forbidden:
            if applies:
                with pytest.raises(EpochError):
                    call()

        assert before == repr(epochs)

    @invariant()
    def what_can_be_read_is_whole(self) -> None:
        if self.epochs.readable:
            assert (self.epochs.version or 0) == self.visible

    @invariant()
    def what_is_exposed_cannot_be_read(self) -> None:
        if self.epochs.exposed is None or self.epochs.mode is Mode.STAGED:
            return
        assert self.epochs.exposed != self.epochs.reading or not self.epochs.readable

    @invariant()
    def nothing_changes_while_a_lease_is_held(self) -> None:
        if self.epochs.leases:
            assert not self.epochs.switching
            assert self.visible is not None

    @invariant()
    def a_slot_has_one_use(self) -> None:
        uses = [self.epochs.exposed is not None, self.epochs.pending is not None]
        assert sum(uses) <= 1

    @invariant()
    def versions_increase(self) -> None:
        assert sorted(set(self.reported)) == self.reported


TestEpochs = EpochMachine.TestCase


@pytest.mark.parametrize("mode", Mode)
def test_a_version_goes_from_exposed_to_readable(mode: Mode) -> None:
    epochs = Epochs(mode)
    states = [epochs.version]
    for version in (3, 4):
        epochs.expose()
        epochs.arrive(version)
        epochs.begin_switch()
        epochs.end_switch()
        states.append(epochs.version)

    assert [None, 3, 4] == states


def test_swap_fills_the_slot_that_nobody_reads() -> None:
    epochs = Epochs(Mode.SWAP)
    found = []
    for version in (1, 2, 3):
        found.append((epochs.reading, epochs.expose()))
        epochs.arrive(version)
        epochs.begin_switch()
        epochs.end_switch()

    assert [(0, 1), (1, 0), (0, 1)] == found


def test_in_place_what_was_torn_is_read_only_when_it_is_whole_again() -> None:
    epochs = Epochs(Mode.INPLACE)
    states = []
    epochs.expose()
    epochs.conceal(written=True)
    states.append((epochs.version, epochs.readable))
    for version, whole in ((1, False), (2, True)):
        epochs.expose()
        epochs.arrive(version)
        epochs.begin_switch()
        epochs.end_switch(whole=whole)
        states.append((epochs.version, epochs.readable))

    assert [(None, False), (None, False), (2, True)] == states


def test_in_place_nothing_is_exposed_while_it_is_read() -> None:
    epochs = Epochs(Mode.INPLACE)
    epochs.acquire()
    with pytest.raises(EpochError):
        epochs.expose()
    epochs.release()

    assert 0 == epochs.expose()


def test_two_versions_never_wait_at_once() -> None:
    epochs = Epochs(Mode.SWAP)
    epochs.expose()
    epochs.arrive(1)
    with pytest.raises(EpochError, match="no slot is free"):
        epochs.expose()
