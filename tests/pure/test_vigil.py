"""When a side of a channel gives a sign of life, and when it misses the other's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.vigil import BEATS, LONGEST_LEASE, SHORTEST_LEASE, Vigil, check_lease

LEASE = 8.0

pauses = st.floats(0, LEASE / BEATS)


@given(st.lists(st.tuples(pauses, st.booleans()), max_size=50))
def test_a_peer_is_dropped_when_it_was_silent_for_a_lease_and_not_before(
    looks: list[tuple[float, bool]],
) -> None:
    vigil = Vigil(LEASE, 0.0)
    now = heard = 0.0
    for pause, spoke in looks:
        now += pause
        heard = now if spoke else heard
        silent = now - heard
        over = vigil.look(heard, now)

        assert silent == pytest.approx(vigil.silent)
        if abs(silent - LEASE) > 1e-6:
            assert (silent > LEASE) == over
        if over:
            return


@given(st.floats(0, LEASE / BEATS), st.floats(LEASE, 1e6))
def test_a_side_that_was_stopped_itself_does_not_judge_before_it_has_read(
    before: float, stopped: float
) -> None:
    vigil = Vigil(LEASE, 0.0)

    assert not vigil.look(0.0, before)
    assert not vigil.look(0.0, before + stopped)
    assert not vigil.look(before + stopped, before + stopped)
    assert 0.0 == vigil.silent


def test_a_side_that_was_stopped_drops_a_peer_that_stays_silent() -> None:
    vigil = Vigil(LEASE, 0.0)

    assert [False, False, False, True] == [
        vigil.look(0.0, now) for now in (1.0, 100.0, 102.0, 104.0)
    ]


@given(st.lists(st.floats(0, 1.5), max_size=60))
def test_who_looks_when_it_should_sends_in_time(late: list[float]) -> None:
    vigil = Vigil(LEASE, 0.0)
    now = sent = 0.0
    for delay in late:
        now += vigil.pause(now) + delay
        vigil.look(now, now)
        if vigil.due(now):
            vigil.sent(now)
            sent = now

        assert now - sent <= LEASE / BEATS
        assert 0 <= vigil.pause(now) <= LEASE / BEATS + 1e-9


@pytest.mark.parametrize(
    "lease", [0, -1, SHORTEST_LEASE / 2, LONGEST_LEASE + 1, float("nan"), float("inf")]
)
def test_a_lease_that_cannot_be_kept_is_refused(lease: float) -> None:
    with pytest.raises(PlanError, match=r"between 0\.2 and 86400 seconds"):
        check_lease(lease)

    assert 3.0 == check_lease(3)
