"""The runs of a plan, the slot that they fill, and ties."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import PlanError
from weightsync.plan import Plan, Run, check, make_plan, slot_layout
from weightsync.spec import Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def whole(
    name: str, *shape: int, dtype: str = "float32", tied: str | None = None
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
    return [Manifest(tuple(rank)) for rank in ranks]


def checked(
    trainers: Sequence[Manifest], replica: Sequence[Manifest], *, partial: bool = False
) -> Plan:
    check(trainers, replica, replica_name="gen-0", partial=partial)
    return make_plan(trainers, replica)


# The slot


def test_tensors_start_at_multiples_of_64_bytes_and_tied_ones_together() -> None:
    layout = slot_layout(
        Manifest(
            (
                whole("half", 3, dtype="float16"),
                whole("empty", 0, 4),
                whole("scalar"),
                whole("again", 3, dtype="float16", tied="half"),
                whole("long", 65, dtype="int8"),
            )
        )
    )

    assert (0, 64, 64, 0, 128) == layout.offsets
    assert 256 == layout.nbytes


def test_a_slot_for_nothing_has_no_bytes() -> None:
    assert 0 == slot_layout(Manifest((whole("empty", 0, 4),))).nbytes


# The runs


def test_equal_boxes_are_one_run() -> None:
    plan = checked(manifests([whole("w", 3, 4, 5)]), manifests([whole("w", 3, 4, 5)]))

    assert ((0, 0),) == plan.pairs
    assert (Run(0, 0, 0, 1, 240, 240, 240),) == plan.runs(0, 0)
    assert 240 == plan.nbytes(0, 0)
    assert () == plan.runs(0, 1)


def test_a_column_slice_moves_its_columns_and_no_more() -> None:
    trainers = manifests(
        [part("w", (8, 6), (0, 0), (4, 6))], [part("w", (8, 6), (4, 0), (4, 6))]
    )
    replica = manifests(
        [part("w", (8, 6), (0, 0), (8, 3))], [part("w", (8, 6), (0, 3), (8, 3))]
    )
    plan = checked(trainers, replica)

    assert (Run(0, 12, 0, 4, 12, 24, 12),) == plan.runs(0, 1)
    assert (Run(0, 12, 48, 4, 12, 24, 12),) == plan.runs(1, 1)
    assert 96 == plan.nbytes(0, 0) + plan.nbytes(1, 0)


def test_the_longest_loop_becomes_the_rows() -> None:
    trainers = manifests([whole("w", 2, 5, 4, dtype="int8")])
    replica = manifests([part("w", (2, 5, 4), (0, 0, 1), (2, 4, 2), dtype="int8")])
    plan = make_plan(trainers, replica)

    expected = (Run(0, 1, 0, 4, 2, 4, 2), Run(0, 21, 8, 4, 2, 4, 2))
    assert expected == plan.runs(0, 0)


def test_what_is_left_of_many_dimensions_becomes_runs() -> None:
    shape, sizes = (4, 5, 6, 3), (2, 3, 4, 1)
    trainers = manifests([whole("w", *shape, dtype="int8")])
    replica = manifests([part("w", shape, (1, 1, 1, 1), sizes, dtype="int8")])
    plan = make_plan(trainers, replica)
    starts = [(run.source_offset, run.target_offset) for run in plan.runs(0, 0)]

    assert {(4, 1, 3, 1)} == {run[3:] for run in plan.runs(0, 0)}
    assert [(112, 0), (130, 4), (148, 8), (202, 12), (220, 16), (238, 20)] == starts


def test_leading_dimensions_that_step_alike_are_merged() -> None:
    trainers = manifests([whole("w", 2, 5, 4, dtype="int8")])
    replica = manifests([part("w", (2, 5, 4), (0, 0, 1), (2, 5, 2), dtype="int8")])
    plan = make_plan(trainers, replica)

    assert (Run(0, 1, 0, 10, 2, 4, 2),) == plan.runs(0, 0)


def test_a_large_tensor_is_cut_over_its_holders() -> None:
    tensor = whole("w", 1024, 256)
    plan = checked(manifests([tensor], [tensor], [tensor]), manifests([tensor]))
    sizes = [plan.nbytes(rank, 0) for rank in range(3)]

    assert [341 * 1024, 341 * 1024, 342 * 1024] == sizes


def test_a_large_tensor_with_a_short_first_dimension_is_cut_along_another() -> None:
    tensor = whole("w", 1, 3, 1 << 18)
    plan = checked(manifests([tensor], [tensor]), manifests([tensor]))

    assert (Run(0, 0, 0, 3, 1 << 19, 1 << 20, 1 << 20),) == plan.runs(0, 0)
    assert plan.nbytes(0, 0) == plan.nbytes(1, 0)


def test_small_tensors_go_to_the_holder_with_least_to_do() -> None:
    shared = [whole(f"t{i}", 16) for i in range(4)]
    trainers = manifests([*shared, whole("own", 32)], shared)
    plan = checked(trainers, manifests([*shared, whole("own", 32)]))

    assert 64 + 128 == plan.nbytes(0, 0)
    assert 3 * 64 == plan.nbytes(1, 0)


def test_a_replicated_shard_is_read_once() -> None:
    top = part("w", (4, 1), (0, 0), (2, 1))
    bottom = part("w", (4, 1), (2, 0), (2, 1))
    trainers = manifests([top], [bottom], [top], [bottom])
    plan = checked(trainers, manifests([whole("w", 4, 1)]))

    assert 16 == sum(plan.nbytes(*pair) for pair in plan.pairs)


def test_a_rank_that_owns_nothing_sends_nothing() -> None:
    trainers = manifests(
        [part("w", (1, 2), (0, 0), (1, 2)), whole("none", 0, 4)],
        [part("w", (1, 2), (1, 0), (0, 2)), whole("none", 0, 4)],
    )
    plan = checked(trainers, manifests([whole("w", 1, 2), whole("none", 0, 4)]))

    assert ((0, 0),) == plan.pairs


def test_a_plan_is_another_when_a_manifest_is() -> None:
    one = make_plan(manifests([whole("a", 2)]), manifests([whole("a", 2)]))
    other = make_plan(manifests([whole("b", 2)]), manifests([whole("b", 2)]))

    assert one.digest != other.digest


# Ties


def test_a_tied_destination_is_written_once() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3, tied="e")])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied="e")])
    plan = checked(trainers, replica)

    assert 60 == plan.nbytes(0, 0)
    assert () == plan.ties


@pytest.mark.parametrize("pushed", ["e", "h"])
def test_one_name_of_a_tied_destination_is_enough(pushed: str) -> None:
    trainers = manifests([whole(pushed, 5, 3)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied="e")])
    plan = checked(trainers, replica)

    assert (Run(0, 0, 0, 1, 60, 60, 60),) == plan.runs(0, 0)


def test_a_tied_source_fills_both_of_an_untied_destination() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3, tied="e")])
    plan = checked(trainers, manifests([whole("e", 5, 3), whole("h", 5, 3)]))

    assert [0, 64] == [run.target_offset for run in plan.runs(0, 0)]
    assert () == plan.ties


def test_names_tied_only_at_the_destination_are_to_be_compared() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied="e")])

    assert (("e", "h"),) == checked(trainers, replica).ties


def test_names_tied_on_some_trainers_only_are_to_be_compared() -> None:
    tied = [whole("e", 2), whole("h", 2, tied="e")]

    both = checked(manifests(tied, tied), manifests(tied))
    one = checked(manifests(tied, [whole("h", 2)]), manifests(tied))
    apart = checked(manifests([whole("h", 2)], [whole("e", 2)]), manifests(tied))

    assert () == both.ties
    assert (("e", "h"),) == one.ties
    assert (("e", "h"),) == apart.ties


def test_ranks_that_own_nothing_of_two_names_do_not_untie_them() -> None:
    tied = [whole("e", 2), whole("h", 2, tied="e")]
    nothing = [part("e", (2,), (2,), (0,)), part("h", (2,), (2,), (0,))]

    assert () == checked(manifests(tied, nothing), manifests(tied)).ties


def test_a_tie_of_one_replica_rank_does_not_excuse_another() -> None:
    replica = manifests(
        [whole("e", 2), whole("h", 2, tied="e")], [whole("e", 2), whole("h", 2)]
    )
    with pytest.raises(PlanError, match=r"missing: 'h'; unexpected: none"):
        check(manifests([whole("e", 2)]), replica, replica_name="gen-0")


# Speed


def test_thousands_of_small_tensors_are_planned_quickly() -> None:
    tensors = [whole(f"layers.{i}.weight", 16, 16) for i in range(5000)]
    trainers, replica = manifests(tensors), manifests(tensors)
    start = time.perf_counter()
    plan = checked(trainers, replica)
    seconds = time.perf_counter() - start

    assert 5000 == len(plan.runs(0, 0))
    assert seconds < 1.0
