"""What a plan refuses before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.errors import DtypeError, PlanError
from weightsync.fit import check
from weightsync.plan import Plan, make_plan
from weightsync.spec import Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def whole(
    name: str, *shape: int, dtype: str = "float32", tied: int | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, shape, Box((0,) * len(shape), shape), tied)


def part(
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: str = "float32",
) -> TensorSpec:
    return TensorSpec(name, dtype, shape, Box(offsets, sizes))


def manifests(*ranks: Sequence[TensorSpec]) -> list[Manifest]:
    return [Manifest.of(tuple(rank)) for rank in ranks]


def checked(
    trainers: Sequence[Manifest], replica: Sequence[Manifest], *, partial: bool = False
) -> Plan:
    check(trainers, replica, replica_name="gen-0", partial=partial)
    return make_plan(trainers, replica)


def refused(
    trainers: Sequence[Manifest],
    replica: Sequence[Manifest],
    *,
    partial: bool = False,
) -> str:
    with pytest.raises(PlanError) as caught:
        check(trainers, replica, replica_name="gen-0", partial=partial)
    return str(caught.value)


def test_missing_and_unexpected_names_are_both_listed() -> None:
    replica = manifests([whole("a", 1), whole("b", 1)])

    message = refused(manifests([whole("x", 1), whole("y", 1)]), replica)
    assert "push to replica 'gen-0': missing: 'a', 'b'; unexpected: 'x', 'y'" == message
    message = refused(manifests([whole("a", 1), whole("b", 1), whole("c", 1)]), replica)
    assert "push to replica 'gen-0': missing: none; unexpected: 'c'" == message


def test_a_part_of_the_names_is_an_error_unless_asked_for() -> None:
    trainers, replica = (
        manifests([whole("a", 1)]),
        manifests([whole("a", 1), whole("b", 1)]),
    )

    assert "missing: 'b'" in refused(trainers, replica)
    assert 4 == checked(trainers, replica, partial=True).nbytes(0, 0)


@pytest.mark.parametrize("partial", [False, True])
def test_an_empty_push_is_always_an_error(partial: bool) -> None:
    for trainers in (manifests([], []), []):
        message = refused(trainers, manifests([whole("a", 1)]), partial=partial)
        assert "no trainer pushes anything" in message


def test_partial_does_not_allow_unexpected_names() -> None:
    trainers = manifests([whole("a", 1), whole("c", 1)])

    assert "unexpected: 'c'" in refused(
        trainers, manifests([whole("a", 1)]), partial=True
    )


def test_long_lists_of_names_are_cut_with_a_count() -> None:
    replica = manifests([whole(f"n{i:02}", 1) for i in range(25)])

    message = refused(manifests([whole("x", 1)]), replica)
    assert "'n19' and 5 more;" in message
    assert "'n20'" not in message


def test_a_name_is_expected_if_any_rank_of_the_replica_has_it() -> None:
    trainers = manifests([whole("a", 1), whole("b", 1)])
    replica = manifests([whole("a", 1)], [whole("b", 1)])

    assert ((0, 0), (0, 1)) == checked(trainers, replica).pairs


def test_shapes_that_differ_are_named_with_both_ranks() -> None:
    message = refused(
        manifests([whole("other", 1)], [whole("w", 2, 3)]),
        manifests([whole("w", 3, 2), whole("other", 1)]),
    )

    assert (
        "'w': global shape is (2, 3) on trainer rank 1 and (3, 2) on "
        "replica 'gen-0' rank 0" == message
    )


def test_dtypes_that_differ_are_named_with_both_ranks() -> None:
    trainers = manifests([whole("w", 2)])
    replica = manifests([whole("w", 2, dtype="bfloat16")])
    with pytest.raises(DtypeError) as caught:
        check(trainers, replica, replica_name="gen-0")

    assert (
        "'w': dtype is float32 on trainer rank 0 and bfloat16 on "
        "replica 'gen-0' rank 0" == str(caught.value)
    )
    assert isinstance(caught.value, TypeError)


def test_trainers_that_contradict_each_other_are_named() -> None:
    message = refused(
        manifests(
            [part("w", (6, 2), (0, 0), (3, 2))], [part("w", (4, 2), (2, 0), (2, 2))]
        ),
        manifests([whole("w", 5, 2)]),
    )
    assert (
        "'w': global shape is (6, 2) on trainer rank 0 and (4, 2) on trainer rank 1"
        == message
    )
    with pytest.raises(DtypeError, match="float32 on trainer rank 0 and int8 on trai"):
        check(
            manifests([whole("w", 2)], [whole("w", 2, dtype="int8")]),
            manifests([whole("w", 2)]),
            replica_name="gen-0",
        )


def test_a_gap_in_what_trainers_hold_is_named() -> None:
    message = refused(
        manifests(
            [part("w", (5, 2), (0, 0), (2, 2))], [part("w", (5, 2), (3, 0), (2, 2))]
        ),
        manifests(
            [part("w", (5, 2), (1, 0), (4, 2))], [part("w", (5, 2), (1, 0), (4, 2))]
        ),
    )

    assert (
        "'w': no trainer holds [2:3, 0:2] of box [1:5, 0:2] of "
        "replica 'gen-0' rank 0" == message
    )


def test_a_tensor_that_no_trainer_holds_a_piece_of_is_a_gap() -> None:
    trainers = manifests([part("w", (5, 2), (0, 0), (0, 2))])

    assert "no trainer holds [0:5, 0:2]" in refused(
        trainers, manifests([whole("w", 5, 2)])
    )


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        (Box((0, 0), (3, 4)), Box((2, 0), (3, 4)), Box((4, 0), (0, 4))),
        (Box((0, 0), (5, 4)), Box((1, 0), (2, 4)), Box((5, 0), (0, 4))),
        (Box((0, 0), (3, 4)), Box((3, 0), (2, 2)), Box((2, 2), (3, 2))),
        (Box((0, 0), (3, 1)), Box((2, 0), (3, 2)), Box((1, 2), (1, 2))),
    ],
)
def test_boxes_that_overlap_without_being_equal_are_named(
    first: Box, second: Box, third: Box
) -> None:
    trainers = manifests(
        *[[TensorSpec("w", "float32", (5, 4), b)] for b in (first, second, third)]
    )

    message = refused(trainers, manifests([whole("w", 5, 4)]))
    assert "overlap without being equal" in message
    assert message.startswith(f"'w': box {first} of trainer rank 0 and box ")


def test_rows_that_two_trainers_hold_are_named() -> None:
    trainers = manifests(
        [part("w", (5, 4), (0, 0), (3, 4))], [part("w", (5, 4), (2, 0), (3, 4))]
    )

    assert refused(trainers, manifests([whole("w", 5, 4)])).endswith("in [2:3, 0:4]")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Box((0, 0), (2, 4)), Box((3, 0), (2, 4)), "none holds [2:3, 0:4] of global"),
        (Box((0, 0), (5, 1)), Box((0, 3), (5, 1)), "none holds [0:5, 1:3] of global"),
        (Box((0, 0), (3, 4)), Box((2, 0), (3, 4)), "without being equal, in [2:3, 0:4"),
    ],
)
def test_ranks_of_a_replica_cut_a_tensor_without_gaps_and_overlaps(
    first: Box, second: Box, message: str
) -> None:
    replica = manifests(
        *[[TensorSpec("w", "float32", (5, 4), b)] for b in (first, second)]
    )

    assert message in refused(manifests([whole("w", 5, 4)]), replica)


def test_ranks_of_a_replica_may_all_want_the_same_part() -> None:
    rows = part("w", (5, 4), (0, 0), (3, 4))
    plan = checked(manifests([whole("w", 5, 4)]), manifests([rows], [rows]))

    assert [48, 48] == [plan.nbytes(0, rank) for rank in range(2)]


def test_casts_are_an_error_unless_asked_for_and_between_floats() -> None:
    trainers = manifests([whole("w", 2)])
    for dtype in ("int32", "complex64", "float8_e8m0fnu"):
        with pytest.raises(DtypeError, match=f"float32 on trainer rank 0 and {dtype}"):
            check(
                trainers,
                manifests([whole("w", 2, dtype=dtype)]),
                replica_name="gen-0",
                cast=True,
            )
    fit = check(
        trainers,
        manifests([whole("w", 2, dtype="float8_e4m3fn")]),
        replica_name="gen-0",
        cast=True,
    )

    assert 2 == fit.nbytes


def test_a_cast_does_not_excuse_another_shape() -> None:
    with pytest.raises(PlanError, match="global shape"):
        check(
            manifests([whole("w", 2)]),
            manifests([whole("w", 2, 1, dtype="bfloat16")]),
            replica_name="gen-0",
            cast=True,
        )
