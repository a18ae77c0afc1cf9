"""Which version is the next: never one that somebody holds already, or a lower one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.counting import LARGEST, Counting, Held, check_epoch
from weightsync.errors import PlanError

HELD = st.builds(Held, st.integers(0, 3), st.integers(0, 20))
HAPPENED = st.lists(st.tuples(st.booleans(), HELD))


@given(HAPPENED, st.none() | st.integers(0, 3), st.none() | st.integers(-2, 25))
def test_the_next_version_is_above_all_that_was_accepted(
    happened: list[tuple[bool, Held]], epoch: int | None, version: int | None
) -> None:
    counting = Counting(epoch)
    known = [Held(0 if epoch is None else epoch, 0)]
    for joined, held in happened:
        if epoch is not None and held.epoch > epoch:
            with pytest.raises(PlanError, match=f"later than epoch {epoch}"):
                counting.joined("g", held)
        elif joined:
            counting.joined("g", held)
            known.append(held)
        else:
            counting.delivered(held)
            known.append(held)
    highest = max(known)
    try:
        found = counting.next(version)
    except PlanError:
        found = None

    fits = version is None or version > highest.version
    expected = highest.version + 1 if version is None else version
    assert (Held(highest.epoch, expected) if fits else None) == found
    assert highest == counting.floor


def test_a_version_that_a_replica_holds_is_refused_with_both_numbers_and_a_remedy() -> (
    None
):
    counting = Counting()
    counting.joined("a", Held(0, 3))
    counting.joined("gen-0", Held(2, 7))
    counting.joined("b", None)
    with pytest.raises(PlanError) as caught:
        counting.next(5)

    assert str(caught.value) == (
        "version 5 does not increase: replica 'gen-0' held version 7 of epoch 2 when "
        "it joined; push a version above it, or start the trainers with epoch=3 to "
        "count anew"
    )


def test_a_version_that_was_delivered_is_refused_as_before() -> None:
    counting = Counting(1)
    counting.joined("gen-0", Held(1, 2))
    counting.delivered(Held(1, 3))
    with pytest.raises(PlanError) as caught:
        counting.next(3)

    assert str(caught.value) == (
        "version 3 does not increase: version 3 was delivered before"
    )


@pytest.mark.parametrize("epoch", [-1, LARGEST + 1])
def test_an_epoch_that_is_none_is_refused(epoch: int) -> None:
    with pytest.raises(PlanError, match="an epoch is a number from 0"):
        check_epoch(epoch)

    assert (None, 0, LARGEST) == tuple(map(check_epoch, (None, 0, LARGEST)))
