"""Every byte of a plan lands in one segment, where the flat window would have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.test_plan_properties import manifests, pushes
from weightsync.budget import FEW, MANY, Budget
from weightsync.engine import ShmEngine
from weightsync.epoch import Mode
from weightsync.errors import PlanError
from weightsync.packing import count_puts, pack
from weightsync.plan import make_plan, slot_layout
from weightsync.prepared import Prepared
from weightsync.segments import Segments, uncrossed
from weightsync.slots import Slots, table
from weightsync.spec import Box, Place, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from weightsync.spec import Manifest

LIMIT = 256

Push = tuple[list["Manifest"], list["Manifest"]]


def bytes_of(runs: Tensor) -> Tensor:
    """Source, byte of it, and byte of the target of all that a table moves."""
    found = [torch.zeros(0, 3, dtype=torch.int64)]
    for source, start, target, rows, size, stride, step in runs.tolist():
        row, byte = torch.arange(rows)[:, None], torch.arange(size)
        moved = start + row * stride + byte, target + row * step + byte
        both = [each.reshape(-1) for each in moved]
        found.append(torch.stack([torch.full_like(both[0], source), *both], dim=1))
    return torch.cat(found)


def in_segments(segments: Segments, runs: Tensor) -> Tensor:
    """The same of a table that is routed, and that each stays in its segment."""
    found: list[Tensor] = []
    for index, part in segments.route(runs):
        moved = bytes_of(part)
        assert 0 <= int(moved[:, 2].min())
        assert int(moved[:, 2].max()) < segments.sizes[index]
        moved[:, 2] += segments.starts[index]
        found.append(moved)
    return torch.cat(found)


def in_order(moved: Tensor) -> Tensor:
    return moved[torch.argsort(moved[:, 2])]


@given(pushes(), st.sampled_from(Mode), st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_every_byte_lands_in_one_segment_at_the_right_offset(
    push: Push, mode: Mode, units: int
) -> None:
    plan = make_plan(*push)
    for trainer, generator in plan.pairs:
        slots = Slots.of(mode, push[1][generator], 64 * units)
        whole = plan.runs(trainer, generator)
        cut = list(uncrossed(whole, slots.cuts))
        for slot in range(slots.count):
            expected = bytes_of(table(whole, slots.data(slot)))
            actual = in_segments(slots.segments, table(cut, slots.data(slot)))

            assert torch.equal(in_order(expected), in_order(actual))


@given(pushes(), st.sampled_from(Mode), st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_there_are_as_many_puts_as_are_counted_and_none_leaves_its_segment(
    push: Push, mode: Mode, units: int
) -> None:
    plan = make_plan(*push)
    for trainer, generator in plan.pairs:
        slots = Slots.of(mode, push[1][generator], 64 * units)
        cut = list(uncrossed(plan.runs(trainer, generator), slots.cuts))
        last = slots.count - 1
        chunks = pack(cut, slots.data(last), slots.header(last, trainer), LIMIT)
        puts = sum(int(chunk.runs[:, 3].sum()) for chunk in chunks)
        for chunk in chunks:
            in_segments(slots.segments, chunk.runs)

        assert count_puts(cut, LIMIT) + 1 == puts
        assert 0 == slots.segments.route(chunks[-1].runs)[-1][0]


@given(pushes(), st.sampled_from(Mode), st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_no_tensor_crosses_and_segments_are_bounded(
    push: Push, mode: Mode, units: int
) -> None:
    for manifest in push[1]:
        slots = Slots.of(mode, manifest, 64 * units)
        segments, layout = slots.segments, slot_layout(manifest)
        sizes = [tensor.nbytes for tensor in manifest.tensors]
        for offset, size in zip(layout.offsets, sizes, strict=True):
            for slot in range(slots.count if size else 0):
                start = slots.data(slot) + offset
                first, last = segments.at(start), segments.at(start + size - 1)

                assert first[0] == last[0]
                assert 0 == first[1] % 64
        largest = max([64 * units, *[size + -size % 64 for size in sizes]])

        assert slots.nbytes == sum(segments.sizes)
        if slots.cuts:
            assert slots.data(0) == segments.sizes[0]
            assert largest >= max(segments.sizes[1:])
            assert all(size > 0 for size in segments.sizes)


def placed(*storages: int) -> Manifest:
    """One piece of each storage, smaller than it by four bytes."""
    pieces = [
        TensorSpec(
            f"t{number}",
            "int8",
            (size - 4,),
            Box((0,), (size - 4,)),
            place=Place(number, 4, (1,)),
        )
        for number, size in enumerate(storages)
    ]
    return type(manifests([])[0]).of(pieces, storages)


def test_storages_are_not_cut_where_a_slot_mirrors_them() -> None:
    slots = Slots.of(Mode.SWAP, placed(100, 20, 300, 10, 10), 192)
    head = slots.data(0)
    starts = [start - head for start in slots.segments.starts[1:]]

    assert [0, 192, 512, 640, 832, 1152] == starts
    assert (192, 320, 128) * 2 == slots.segments.sizes[1:]


def test_two_boxes_of_a_name_that_become_one_run_are_cut_between_segments() -> None:
    whole = TensorSpec("w", "int8", (256,), Box((0,), (256,)))
    halves = [
        TensorSpec("w", "int8", (256,), Box((start,), (128,))) for start in (0, 128)
    ]
    trainers, replica = manifests([whole]), manifests(halves)
    plan = make_plan(trainers, replica)
    slots = Slots.of(Mode.STAGED, replica[0], 128)
    prepared = Prepared(plan, ShmEngine(), [slots])
    cut = [(run.target_offset, run.nbytes) for run in prepared.runs(0, 0)]

    assert [256] == [run.nbytes for run in plan.runs(0, 0)]
    assert [(0, 128), (128, 128)] == cut
    assert 3 == prepared.signals(0, 0)


@pytest.mark.parametrize("segment", [0, 1 << 20, 1 << 30])
def test_what_is_small_or_has_no_bound_is_one_segment(segment: int) -> None:
    small = manifests([TensorSpec("w", "int8", (1000,), Box((0,), (1000,)))])[0]
    segments = Slots.of(Mode.SWAP, small, segment).segments

    assert (0,) == segments.starts


# The budget


@given(st.lists(st.integers(1, 1 << 32), min_size=1, max_size=4))
def test_the_number_that_an_error_names_would_do_and_is_not_exceeded(
    largest: list[int],
) -> None:
    budget = FEW
    while True:
        try:
            taken = taken_of(Budget(budget), largest)
        except PlanError as error:
            named = int(str(error).split("; staging_bytes=")[1].split(" ")[0])
            assert named > budget
            budget = named
        else:
            break

    assert taken <= budget


def taken_of(budget: Budget, largest: list[int]) -> int:
    """What is taken when replicas with such segments join in turn."""
    taken, before = budget.chunks(cut=True), 0
    for each in largest:
        budget.check(each)
        if each > before:
            before = budget.take(each)
            taken += before
    return taken


def test_without_a_budget_there_are_more_chunks_for_large_models() -> None:
    free = Budget(None)
    free.check(1 << 40)

    assert [FEW, MANY] == [free.chunks(cut=cut) for cut in (False, True)]


def test_a_large_window_in_one_piece_takes_as_much_and_fits_no_budget() -> None:
    with pytest.raises(PlanError, match="one piece of 1073741824 bytes"):
        Budget(2 * MANY).chunks(1 << 30, cut=False)

    assert 1 << 30 == Budget(None).chunks(1 << 30, cut=False)


def test_less_than_the_least_is_an_error_that_names_it() -> None:
    with pytest.raises(PlanError, match=f"staging_bytes=1 is too little: {FEW} are"):
        Budget(1)
