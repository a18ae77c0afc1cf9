"""Which pieces must have equal bytes, and what is said where they have not."""

from __future__ import annotations

import pytest

from weightsync.alike import Alike, compare, must_be_alike, to_digest
from weightsync.errors import PlanError, ProtocolError
from weightsync.spec import Box, Manifest, TensorSpec


def rows(
    name: str, start: int, count: int, *, replica: int = 0, tied: int | None = None
) -> TensorSpec:
    """Rows of a tensor of shape (4, 1)."""
    box = Box((start, 0), (count, 1))
    return TensorSpec(name, "float32", (4, 1), box, tied, replica)


def ranks(*held: list[TensorSpec]) -> list[Manifest]:
    return [Manifest.of(specs) for specs in held]


def digests(*values: str) -> dict[int, list[bytes]]:
    """One letter for each digest of each rank."""
    return {
        rank: [letter.encode() * 16 for letter in letters]
        for rank, letters in enumerate(values)
    }


HYBRID = ranks(
    [rows("w", 0, 2), rows("b", 0, 4)],
    [rows("w", 2, 2)],
    [rows("w", 0, 2, replica=1)],
    [rows("w", 2, 2, replica=1)],
)


def _all(trainers: list[Manifest]) -> tuple[Alike, ...]:
    return must_be_alike(trainers, [], copies=True)


def test_only_what_several_ranks_hold_is_digested() -> None:
    alike = _all(HYBRID)

    assert [Box((0, 0), (2, 1)), Box((2, 0), (2, 1))] == [one.box for one in alike]
    assert [(0,), (0,), (0,), (0,)] == to_digest(alike, 4)


def test_nothing_is_digested_unless_that_is_asked() -> None:
    assert () == must_be_alike(HYBRID, [], copies=False)


def test_copies_that_are_equal_pass() -> None:
    compare(_all(HYBRID), digests("x", "y", "x", "y"))


def test_copies_that_differ_are_named_with_box_and_ranks() -> None:
    with pytest.raises(PlanError) as raised:
        compare(_all(HYBRID), digests("x", "y", "x", "z"))

    assert (
        "'w': box [2:4, 0:1] has different values: on trainer rank 1 and on trainer "
        "rank 3"
    ) == str(raised.value)


def test_all_ranks_of_a_side_are_named() -> None:
    trainers = ranks(*[[rows("w", 0, 4)]] * 4)
    with pytest.raises(PlanError, match="trainer ranks 0, 2, 3 and on trainer rank "):
        compare(_all(trainers), digests("x", "y", "x", "x"))


def test_another_number_of_digests_than_asked_for_is_refused() -> None:
    with pytest.raises(ProtocolError, match="trainer rank 3"):
        compare(_all(HYBRID), digests("x", "y", "x", "yy"))


def test_tied_names_are_compared_wherever_they_are_held() -> None:
    trainers = ranks([rows("e", 0, 4)], [rows("h", 0, 4)])
    alike = must_be_alike(trainers, [("e", "h")], copies=False)
    compare(alike, digests("x", "x"))

    with pytest.raises(PlanError, match="'e' and 'h' share one storage on the gen"):
        compare(alike, digests("x", "y"))


def test_tied_names_are_compared_piece_by_piece() -> None:
    trainers = ranks(
        [rows("e", 0, 2), rows("e", 2, 2), rows("h", 2, 2), rows("h", 0, 2)]
    )
    alike = must_be_alike(trainers, [("e", "h")], copies=False)
    compare(alike, digests("xyyx"))

    with pytest.raises(PlanError, match=r"box \[0:2, 0:1\] has different values"):
        compare(alike, digests("xyxy"))


def test_tied_names_that_are_cut_differently_cannot_be_compared() -> None:
    trainers = ranks([rows("e", 0, 4), rows("h", 0, 2)], [rows("h", 2, 2)])

    with pytest.raises(PlanError, match=r"'e' and 'h' .*cut them differently"):
        must_be_alike(trainers, [("e", "h")], copies=False)


def test_names_of_one_memory_are_digested_once() -> None:
    shared = [rows("a", 0, 4), rows("b", 0, 4, tied=0)]
    alike = _all(ranks(shared, shared))

    assert [(0,), (0,)] == to_digest(alike, 2)
    assert () == _all(ranks(shared))
