"""The runs of a plan, the slot that they fill, and ties."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import PlanError
from weightsync.fit import Fit, check
from weightsync.plan import (
    CAST_BYTES,
    Cast,
    Plan,
    Run,
    make_plan,
    sent_bytes,
    slot_layout,
    sum_of_digests,
)
from weightsync.spec import Box, Manifest, Place, TensorSpec

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


def fit(
    trainers: Sequence[Manifest], replica: Sequence[Manifest], *, cast: bool = False
) -> Fit:
    return check(trainers, replica, replica_name="gen-0", cast=cast)


# The slot


def test_tensors_start_at_multiples_of_64_bytes_and_tied_ones_together() -> None:
    layout = slot_layout(
        Manifest.of(
            (
                whole("half", 3, dtype="float16"),
                whole("empty", 0, 4),
                whole("scalar"),
                whole("again", 3, dtype="float16", tied=0),
                whole("long", 65, dtype="int8"),
            )
        )
    )

    assert (0, 64, 64, 0, 128) == layout.offsets
    assert 256 == layout.nbytes


def test_a_slot_for_nothing_has_no_bytes() -> None:
    assert 0 == slot_layout(Manifest.of((whole("empty", 0, 4),))).nbytes


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


def test_a_tensor_is_never_put_together_from_copies() -> None:
    tensor = whole("w", 1 << 20, 4)
    plan = checked(manifests([tensor], [tensor], [tensor]), manifests([tensor]))

    assert ((0, 0),) == plan.pairs


def test_copies_share_the_work_tensor_by_tensor() -> None:
    shared = [whole(f"t{i}", 16) for i in range(4)]
    trainers = manifests([*shared, whole("own", 32)], shared)
    plan = checked(trainers, manifests([*shared, whole("own", 32)]))

    assert 64 + 128 == plan.nbytes(0, 0)
    assert 3 * 64 == plan.nbytes(1, 0)


def test_what_leaves_no_choice_decides_who_has_least_to_do() -> None:
    both = whole("z", 100)
    trainers = manifests([both, whole("a", 50)], [both])
    plan = checked(trainers, manifests([both, whole("a", 50)]))

    assert [200, 400] == [plan.nbytes(rank, 0) for rank in range(2)]


def copy_of(replica: int, row: int) -> TensorSpec:
    return TensorSpec("w", "float32", (4, 1), Box((row, 0), (2, 1)), None, replica)


def test_a_sharded_tensor_comes_from_one_copy_and_is_read_once() -> None:
    """On a mesh in any order: what counts is the number of the copy."""
    ranks = [copy_of(0, 0)], [copy_of(1, 2)], [copy_of(1, 0)], [copy_of(0, 2)]
    plan = checked(manifests(*ranks), manifests([whole("w", 4, 1)]))

    assert ((0, 0), (3, 0)) == plan.pairs
    assert 16 == sum(plan.nbytes(*pair) for pair in plan.pairs)


def test_every_replica_gets_a_tensor_from_the_same_ranks() -> None:
    names = [f"t{i}" for i in range(6)]
    trainers = manifests(*[[whole(name, 8, 8) for name in names]] * 3)
    halves = manifests(
        [part(name, (8, 8), (0, 0), (4, 8)) for name in names],
        [part(name, (8, 8), (4, 0), (4, 8)) for name in reversed(names)],
    )
    senders = {
        (pair[0], trainers[pair[0]].names[run.source])
        for replica in (manifests([whole(name, 8, 8) for name in names]), halves)
        for plan in [checked(trainers, replica)]
        for pair in plan.pairs
        for run in plan.runs(*pair)
    }

    assert sorted(names) == sorted(name for _, name in senders)
    assert [2, 2, 2] == [sum(rank == r for r, _ in senders) for rank in range(3)]


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


def test_the_plans_of_single_ranks_are_the_whole_plan() -> None:
    trainers = manifests(
        [part("w", (8, 6), (0, 0), (3, 6)), whole("n", 5)],
        [part("w", (8, 6), (3, 0), (5, 6)), whole("n", 5)],
    )
    replica = manifests(
        [part("w", (8, 6), (0, 0), (8, 3)), whole("n", 5)],
        [part("w", (8, 6), (0, 3), (8, 3)), whole("n", 5)],
    )
    plan = make_plan(trainers, replica)
    rows = [make_plan(trainers, replica, trainer=rank) for rank in range(2)]
    columns = [make_plan(trainers, replica, generator=rank) for rank in range(2)]

    for plans, side in ((rows, 0), (columns, 1)):
        for rank, mine in enumerate(plans):
            pairs = [pair for pair in plan.pairs if pair[side] == rank]
            assert pairs == list(mine.pairs)
            assert [plan.runs(*p) for p in pairs] == [mine.runs(*p) for p in pairs]
        assert plan.digest == sum_of_digests([mine.digest for mine in plans])


def test_what_is_sent_is_known_without_a_plan() -> None:
    trainers = manifests(
        [part("w", (8, 6), (0, 0), (3, 6)), whole("n", 5)],
        [part("w", (8, 6), (3, 0), (5, 6)), whole("n", 5)],
    )
    replica = manifests([whole("w", 8, 6), whole("n", 5)], [whole("n", 5)])
    plan = make_plan(trainers, replica)

    assert [plan.nbytes(0, 0) + plan.nbytes(0, 1), plan.nbytes(1, 0)] == sent_bytes(
        trainers, replica
    )
    assert sum(sent_bytes(trainers, replica)) == fit(trainers, replica).nbytes


# Several pieces of a name


def test_a_rank_may_hold_several_pieces_of_a_name() -> None:
    """As where rows of a shard are apart, and where a fused tensor takes two slices."""
    trainers = manifests(
        [part("w", (8,), (0,), (2,)), part("w", (8,), (4,), (2,))],
        [part("w", (8,), (2,), (2,)), part("w", (8,), (6,), (2,))],
    )
    replica = manifests([part("w", (8,), (4,), (4,)), part("w", (8,), (0,), (4,))])
    plan = checked(trainers, replica)

    assert [(1, 0), (0, 64)] == [
        (run.source, run.target_offset) for run in plan.runs(0, 0)
    ]
    assert [(1, 8), (0, 72)] == [
        (run.source, run.target_offset) for run in plan.runs(1, 0)
    ]


def test_runs_of_two_pieces_that_follow_each_other_are_one() -> None:
    trainers = manifests([whole("experts", 4, 16)])
    pieces = [part("experts", (4, 16), (i, 0), (1, 16)) for i in range(4)]
    plan = checked(trainers, manifests(pieces))

    assert (Run(0, 0, 0, 1, 256, 256, 256),) == plan.runs(0, 0)


def test_a_name_may_be_wanted_twice() -> None:
    trainers = manifests([whole("e", 5, 3)])
    plan = checked(trainers, manifests([whole("e", 5, 3), whole("e", 5, 3)]))

    assert [0, 64] == [run.target_offset for run in plan.runs(0, 0)]


# Slots that mirror storages


def test_a_slot_mirrors_the_storages_of_its_rank() -> None:
    """Two columns of a (2, 4) storage of float32, and a storage of their own."""

    def column(name: str, at: int) -> TensorSpec:
        spec = whole(name, 2, 2)
        return spec._replace(place=Place(0, at, (16, 4)))

    own = whole("own", 3)._replace(place=Place(1, 0, (4,)))
    pieces = column("right", 8), column("left", 0), own
    replica = [Manifest.of(pieces, storages=(32, 12))]
    plan = checked(
        manifests([whole("left", 2, 2), whole("right", 2, 2), whole("own", 3)]), replica
    )

    assert (8, 0, 64) == slot_layout(replica[0]).offsets
    assert 128 == slot_layout(replica[0]).nbytes
    assert (
        Run(0, 0, 0, 2, 8, 8, 16),
        Run(1, 0, 8, 2, 8, 8, 16),
        Run(2, 0, 64, 1, 12, 12, 12),
    ) == plan.runs(0, 0)


# Casts


def test_a_cast_counts_bytes_of_what_it_makes() -> None:
    trainers = manifests([part("w", (8, 4), (0, 0), (6, 4))], [whole("n", 3)])
    wanted = part("w", (8, 4), (2, 1), (3, 2), dtype="bfloat16")
    replica = manifests([wanted, whole("n", 3)])
    amount = fit(trainers, replica, cast=True)
    plan = make_plan(trainers, replica)

    assert (Cast("bfloat16", Run(0, 18, 0, 3, 4, 8, 4)),) == plan.casts(0, 0)
    assert () == plan.runs(0, 0)
    assert (3, 12) == (plan.rows(0, 0), plan.nbytes(0, 0))
    assert () == plan.casts(1, 0)
    assert 24 == amount.nbytes


def test_large_casts_come_in_pieces() -> None:
    rows = CAST_BYTES // 2 // 1024 + 1
    trainers = manifests([whole("w", rows, 1024), whole("v", rows, 1024)])
    replica = manifests(
        [
            part("v", (rows, 1024), (0, 0), (rows, 512), dtype="float16"),
            whole("w", rows, 1024, dtype="float16"),
        ]
    )
    casts = make_plan(trainers, replica).casts(0, 0)

    assert [CAST_BYTES // 2 + 1024, CAST_BYTES, 2048] == [c.run.nbytes for c in casts]
    assert [rows, 1, 1] == [cast.run.rows for cast in casts]


# Ties


def test_a_tied_destination_is_written_once() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3, tied=0)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied=0)])
    plan = checked(trainers, replica)

    assert 60 == plan.nbytes(0, 0)
    assert Fit(60, ()) == fit(trainers, replica)


def test_an_alias_of_what_is_wanted_may_be_pushed_too() -> None:
    nothing = [part("e", (5, 3), (5, 0), (0, 3)), part("h", (5, 3), (5, 0), (0, 3))]
    tied = manifests(nothing, [whole("e", 5, 3), whole("h", 5, 3, tied=0)])
    apart = manifests(nothing, [whole("e", 5, 3), whole("h", 5, 3)])
    replica = manifests([whole("h", 5, 3)])
    with pytest.raises(PlanError, match="unexpected: 'e'"):
        fit(apart, replica)

    assert Fit(60, ()) == fit(tied, replica)


@pytest.mark.parametrize("pushed", ["e", "h"])
def test_one_name_of_a_tied_destination_is_enough(pushed: str) -> None:
    trainers = manifests([whole(pushed, 5, 3)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied=0)])
    plan = checked(trainers, replica)

    assert (Run(0, 0, 0, 1, 60, 60, 60),) == plan.runs(0, 0)


def test_a_tied_source_fills_both_of_an_untied_destination() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3, tied=0)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3)])
    plan = checked(trainers, replica)

    assert [0, 64] == [run.target_offset for run in plan.runs(0, 0)]
    assert Fit(120, ()) == fit(trainers, replica)


def test_names_tied_only_at_the_destination_are_to_be_compared() -> None:
    trainers = manifests([whole("e", 5, 3), whole("h", 5, 3)])
    replica = manifests([whole("e", 5, 3), whole("h", 5, 3, tied=0)])

    assert (("e", "h"),) == fit(trainers, replica).ties


def test_names_tied_on_some_trainers_only_are_to_be_compared() -> None:
    tied = [whole("e", 2), whole("h", 2, tied=0)]

    both = fit(manifests(tied, tied), manifests(tied))
    one = fit(manifests(tied, [whole("h", 2)]), manifests(tied))
    apart = fit(manifests([whole("h", 2)], [whole("e", 2)]), manifests(tied))

    assert () == both.ties
    assert (("e", "h"),) == one.ties
    assert (("e", "h"),) == apart.ties


def test_ranks_that_own_nothing_of_two_names_do_not_untie_them() -> None:
    tied = [whole("e", 2), whole("h", 2, tied=0)]
    nothing = [part("e", (2,), (2,), (0,)), part("h", (2,), (2,), (0,))]

    assert () == fit(manifests(tied, nothing), manifests(tied)).ties


def test_a_tie_of_one_replica_rank_does_not_excuse_another() -> None:
    replica = manifests(
        [whole("e", 2), whole("h", 2, tied=0)], [whole("e", 2), whole("h", 2)]
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
