"""What is converted in a scratch buffer, compared with ``Tensor.to`` of the whole."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.casting import HALF_BYTES, Batch, Scratch, batches
from weightsync.plan import Cast, Run, make_plan, slot_layout
from weightsync.spec import CONVERTIBLE, Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BASE = 192
GUARD = 0xA5
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = sorted(CONVERTIBLE)

# Ties, and the largest and smallest of each dtype with what lies just beyond.
SIGNS = (0.0, -0.0, math.inf, -math.inf, math.nan)
TIES = (1.00390625, 1.01171875, 464.0, 65519.9, 65520.0, 61440.0, 248.0, 3.3895e38)
ENDS = (448.0, 465.0, 57344.0, 65504.0, 240.0, 1e39, 2**-9, 2**-10, 3 * 2**-11)
ODD = (*SIGNS, *TIES, *ENDS, 1e-40, -1e-46, 5e-8, 3e-8)


def named(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def alike(expected: Tensor, found: Tensor) -> bool:
    """Equal in bytes, but for which NaN it is: torch's depends on the alignment."""
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    nan = expected.to(torch.float64).isnan()
    carrier = CARRIERS[expected.dtype.itemsize]
    same = expected.contiguous().view(carrier) == found.contiguous().view(carrier)
    return bool(torch.where(nan, found.to(torch.float64).isnan(), same).all())


def patterns(dtype: torch.dtype, numel: int) -> Tensor:
    """Every bit pattern of a small dtype, of a large one many and all that is odd."""
    if dtype.itemsize <= 2:
        count = 1 << 8 * dtype.itemsize
        every = torch.arange(count).to(CARRIERS[dtype.itemsize])
        return every.repeat(-(-numel // count))[:numel].view(dtype)
    random = torch.Generator().manual_seed(numel)
    size = (numel, dtype.itemsize)
    data = torch.randint(256, size, dtype=torch.uint8, generator=random)
    values = data.view(dtype).view(-1)
    odd = torch.tensor(ODD, dtype=dtype)
    values[: odd.numel()] = odd
    values[-odd.numel() :] = odd
    return values


def carry_out(
    found: Sequence[Batch], tensors: Sequence[Tensor], window: Tensor
) -> list[int]:
    """Convert every batch and put it; return how many rows each of them put."""
    halves = Scratch().halves
    rows: list[int] = []
    for number, batch in enumerate(found):
        half = halves[number % 2]
        half.fill_(GUARD)
        for conversion in batch.conversions:
            conversion.run(tensors, half)
        rows.append(0)
        for index, start, at, count, nbytes, stride, step in batch.runs.tolist():
            assert index == 0
            for row in range(count):
                first = start + row * stride
                to = at + row * step
                window[to : to + nbytes] = half[first : first + nbytes]
            rows[-1] += count
    return rows


def whole(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, Box.whole(shape))


PAIRS = [pair for pair in product(DTYPES, DTYPES) if pair[0] != pair[1]]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_conversion_rounds_as_torch_does(source: str, target: str) -> None:
    numel = 3 * HALF_BYTES // named(target).itemsize + 5
    if source == "float64":  # 8 bytes each: enough to need a second batch
        numel = HALF_BYTES // named(target).itemsize + 5
    tensor = patterns(named(source), numel)
    pushed = Manifest.of([whole("w", source, numel)])
    wanted = Manifest.of([whole("w", target, numel)])
    plan = make_plan([pushed], [wanted])
    window = torch.full((BASE + numel * named(target).itemsize + 64,), GUARD).byte()
    rows = carry_out(batches(plan.casts(0, 0), BASE), [tensor], window)

    found = window[BASE:-64].view(named(target))
    assert alike(tensor.to(named(target)), found)
    assert plan.rows(0, 0) == sum(rows)
    assert {GUARD} == set(window[:BASE].tolist() + window[-64:].tolist())


def test_the_example_of_the_documentation_rounds_to_the_nearest_even() -> None:
    tensor = torch.tensor([1.00390625, 1.01171875, 1e-40])
    (batch,) = batches([Cast("bfloat16", Run(0, 0, 0, 1, 6, 6, 6))], 0)
    half = Scratch().halves[0]
    batch.conversions[0].run([tensor], half)

    assert [1.0, 1.015625, 9.183549615799121e-41] == (
        half[:6].view(torch.bfloat16).tolist()
    )


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[int]:
    """Where a dimension is cut, with both ends."""
    inner = draw(st.sets(st.integers(0, size), max_size=2))
    return sorted({0, size} | inner)


@st.composite
def cut_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor once."""
    axes = [draw(cuts(size)) for size in shape]
    spans = [list(pairwise(axis)) for axis in axes]
    return [
        Box(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in product(*spans)
    ]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_cut_arrives_as_the_whole_tensor_converted(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    source = data.draw(st.sampled_from(DTYPES))
    targets = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    tensor = patterns(named(source), max(Box.whole(shape).numel, 64))
    tensor = tensor[: Box.whole(shape).numel].view(shape)
    held, boxes = data.draw(cut_boxes(shape)), data.draw(cut_boxes(shape))
    trainers = [Manifest.of([TensorSpec("w", source, shape, box)]) for box in held]
    replica = [
        Manifest.of([TensorSpec("w", dtype, shape, box) for box in boxes])
        for dtype in targets
    ]
    plan = make_plan(trainers, replica)
    for generator, dtype in enumerate(targets):
        layout = slot_layout(replica[generator])
        window = torch.full((BASE + layout.nbytes,), GUARD, dtype=torch.uint8)
        for trainer, box in enumerate(held):
            found = batches(plan.casts(trainer, generator), BASE)
            rows = carry_out(found, [_part(tensor, box).contiguous()], window)

            exact = sum(run.rows for run in plan.runs(trainer, generator))
            assert plan.rows(trainer, generator) == exact + sum(rows)
        if dtype != source:
            for box, offset in zip(boxes, layout.offsets, strict=True):
                expected = _part(tensor, box).to(named(dtype)).contiguous()
                end = BASE + offset + expected.nbytes
                arrived = window[BASE + offset : end].view(named(dtype))

                assert alike(expected.view(-1), arrived)


def _part(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 50_000), st.booleans()),
        max_size=40,
    )
)
def test_batches_hold_all_casts_in_order_and_fit_into_a_half(
    sizes: list[tuple[int, int, bool]],
) -> None:
    casts = [
        Cast(
            "bfloat16" if small else "float64",
            Run(index, 8, 1024 * index, rows, 8 * numel, 8 * numel + 8, 8 * numel),
        )
        for index, (rows, numel, small) in enumerate(sizes)
        if rows * 8 * numel <= HALF_BYTES
    ]
    found = batches(casts, BASE)
    ends: list[int] = []
    for batch in found:
        end = 0
        for conversion in batch.conversions:
            assert end <= conversion.at
            assert 0 == conversion.at % 64
            numel = conversion.rows * conversion.row_numel
            end = conversion.at + numel * conversion.dtype.itemsize
        ends.append(end)

    indices = [conversion.source for b in found for conversion in b.conversions]
    targets = [row[2] for batch in found for row in batch.runs.tolist()]
    assert [cast.run.source for cast in casts] == indices
    assert [BASE + cast.run.target_offset for cast in casts] == targets
    assert all(0 < end <= HALF_BYTES for end in ends)
    rows = [int(batch.runs[:, 3].sum()) for batch in found]
    assert sum(cast.run.rows for cast in casts) == sum(rows)


def test_nothing_to_convert_is_no_batch() -> None:
    assert () == batches([], BASE)


def test_a_cast_as_large_as_a_half_is_a_batch_of_its_own() -> None:
    row = HALF_BYTES
    casts = [
        Cast("bfloat16", Run(0, i * row, i * row, 1, row, row, row)) for i in (0, 1)
    ]
    found = batches(casts, 0)

    assert [1, 1] == [len(batch.conversions) for batch in found]


def test_a_source_that_has_lost_its_memory_is_not_read() -> None:
    tensor = torch.ones(8)
    (batch,) = batches([Cast("bfloat16", Run(0, 0, 0, 1, 16, 16, 16))], 0)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="storage"):
        batch.conversions[0].run([tensor], Scratch().halves[0])
