"""The log of membership events, as the leader and those who follow it keep it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync.membership import REMEMBERED_EVENTS, EventLog, MembershipEvent


def _log(count: int) -> EventLog:
    log = EventLog()
    for index in range(count):
        log.add("joined", "replica", f"gen-{index}", "")
    return log


@given(st.integers(0, 3 * REMEMBERED_EVENTS), st.integers(-5, 4 * REMEMBERED_EVENTS))
def test_what_comes_after_a_number_is_the_first_that_is_still_remembered(
    count: int, number: int
) -> None:
    found = _log(count).after(number)
    oldest = max(count - REMEMBERED_EVENTS, 0) + 1
    expected = max(number + 1, oldest)

    assert (expected if expected <= count else None) == (found and found.number)


@given(st.integers(0, 50), st.lists(st.integers(0, 20), max_size=10))
def test_a_follower_that_joins_late_has_the_same_log(
    before: int, batches: list[int]
) -> None:
    leader = _log(before)
    follower = EventLog()
    follower.extend(leader)
    for size in batches:
        follower.extend([leader.add("left", "replica", "g", "") for _ in range(size)])

    assert list(leader) == list(follower)
    assert leader.number == follower.number


def test_an_event_says_for_people_what_happened() -> None:
    failed = MembershipEvent(3, 0.0, "failed", "replica", "gen-0", "it hung")
    left = MembershipEvent(4, 0.0, "left", "trainer", "1")

    assert "replica 'gen-0' failed: it hung" == str(failed)
    assert "trainer rank 1 left" == str(left)


def test_the_last_failure_is_that_of_a_replica_that_has_not_come_back() -> None:
    log = _log(2)
    nothing = log.last_failure(())
    log.add("failed", "replica", "gen-0", "it hung")
    failed = log.add("failed", "replica", "gen-1", "it died")
    log.add("left", "replica", "gen-2", "")
    log.add("failed", "trainer", "1", "it died")

    found = log.last_failure({"gen-0", "gen-2"})
    here = log.last_failure({"gen-1"})
    log.add("joined", "replica", "gen-1", "")
    log.add("left", "replica", "gen-1", "")
    gone = log.last_failure(())

    assert nothing is None
    assert failed == found
    assert here is None
    assert gone is None
