"""What a generator registers, and memory that is shared."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import (
    PlanError,
    UnsupportedError,
)
from weightsync.layout import Shard, capture, register
from weightsync.spec import Box


def test_destinations_are_the_callers_own_tensors() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    tensors = {
        "inference": inference,
        "leaf": torch.nn.Parameter(torch.zeros(2, 2)),
        "strided": torch.zeros(4, 6)[:, ::2],
        "scalar": torch.tensor(1),
        "none": torch.zeros(0, 4),
    }
    registered = register(tensors)

    for mine, tensor in zip(tensors.values(), registered.tensors, strict=True):
        assert mine is tensor
    assert tuple(tensors) == registered.manifest.names
    assert inference.is_inference()
    assert tensors["leaf"].is_leaf


def test_a_shard_is_registered_at_its_place() -> None:
    tensor = torch.zeros(4, 2)
    registered = register(
        {"_orig_mod.w": Shard(tensor, global_shape=[8, 6], offsets=[4, 2])}
    )

    (spec,) = registered.manifest.tensors
    assert ("w", (8, 6), Box((4, 2), (4, 2))) == (spec.name, spec.shape, spec.box)
    assert tensor is registered.tensors[0]


def test_nothing_to_register_is_an_error() -> None:
    with pytest.raises(PlanError, match="holds no tensor"):
        register({})


def test_destinations_that_are_one_tensor_are_tied() -> None:
    e = torch.zeros(5, 1)
    registered = register(
        {"e": e, "h": torch.nn.Parameter(e), "v": e.as_strided((5, 1), (1, 7))}
    )

    assert [None, 0, 0] == [t.tied for t in registered.manifest.tensors]


def test_empty_destinations_are_never_tied() -> None:
    e = torch.zeros(4)
    tensors = {"a": e[:0], "b": e[:0], "c": torch.zeros(0), "d": torch.zeros(0)}

    registered = register(tensors)
    assert {None} == {tensor.tied for tensor in registered.manifest.tensors}


def test_interleaved_slices_of_one_buffer_are_accepted() -> None:
    fused = torch.zeros(6, 12)
    registered = register(
        {
            "q": fused[:, :8],
            "k": fused[:, 8:10],
            "v": fused[::2, 10:],
            "rest": fused[1::2, 10:],
        }
    )

    assert 4 == len(registered.tensors)


def test_rows_of_one_fused_buffer_are_accepted() -> None:
    fused = torch.full((12, 4), -777)

    assert 3 == len(
        register({"q": fused[:8], "k": fused[8:10], "v": fused[10:]}).tensors
    )


def test_bytes_between_the_elements_of_another_are_free() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    wide = buffer.view(torch.float32)[::2]
    narrow = buffer[5:8]

    assert 2 == len(register({"wide": wide, "narrow": narrow}).tensors)
    with pytest.raises(PlanError, match="'wide' and 'hit' share"):
        register({"wide": wide, "hit": buffer[7:9]})


def overlapping() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    w = torch.zeros(6, 6)
    return {
        "rows": (w[:4], w[3:]),
        "columns": (w[:, :3], w[:, 2:4]),
        "transposed": (w, w.t()),
        "flat": (w, w.view(36)),
        "element": (w, w[2, 2]),
        "dtype": (w, w.view(torch.int32)),
        "steps": (w[::2], w[::3]),
    }


@pytest.mark.parametrize("case", overlapping())
def test_destinations_that_share_part_of_their_memory_are_both_named(
    case: str,
) -> None:
    first, second = overlapping()[case]
    with pytest.raises(PlanError) as caught:
        register({"a": first, "other": torch.zeros(2), "b": second})

    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)
    assert "'other'" not in str(caught.value)


def test_an_overlap_behind_a_short_neighbour_is_found() -> None:
    w = torch.zeros(6, 6)
    with pytest.raises(PlanError, match="'a' and 'c' share part of their memory"):
        register({"a": w[:, :3], "b": w[0, 3:5], "c": w[4, 2:4]})


def test_one_memory_cannot_be_two_parts_of_a_tensor() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(PlanError, match="'a' and 'b' share part of their memory"):
        register(
            {
                "a": Shard(rows, global_shape=(4, 3), offsets=(0, 0)),
                "b": Shard(rows, global_shape=(4, 3), offsets=(2, 0)),
            }
        )


@pytest.mark.parametrize(
    ("size", "stride"), [((4, 3), (0, 1)), ((3, 3), (1, 1)), ((2, 3, 2), (3, 2, 1))]
)
def test_a_destination_that_overlaps_itself_is_refused(
    size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(PlanError, match="'w': its elements share memory"):
        register({"w": torch.zeros(12).as_strided(size, stride)})


def test_a_destination_with_interlocking_steps_is_accepted() -> None:
    steps = torch.zeros(12).as_strided((2, 3), (3, 2))

    assert 1 == len(register({"w": steps}).tensors)


def test_lazy_destinations_are_refused() -> None:
    conjugate = torch.tensor([1 + 2j]).conj()
    for value in (conjugate, conjugate.imag):
        with pytest.raises(UnsupportedError, match="'w': cannot receive into"):
            register({"w": value})


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Start, sizes and strides of a view of 100 elements at most."""
    dims = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    strides = draw(st.lists(st.integers(0, 8), min_size=dims, max_size=dims))
    return draw(st.integers(0, 3)), tuple(sizes), tuple(strides)


@given(st.lists(views(), min_size=1, max_size=3))
@settings(deadline=None)
def test_overlap_is_found_exactly_where_elements_coincide(
    layouts: list[tuple[int, tuple[int, ...], tuple[int, ...]]],
) -> None:
    numbers, memory = torch.arange(100), torch.zeros(100)
    alike: dict[object, list[int]] = {}
    for start, sizes, strides in layouts:
        steps = [n > 1 and step for n, step in zip(sizes, strides, strict=True)]
        elements = numbers.as_strided(sizes, strides, start).flatten().tolist()
        alike[(start, sizes, tuple(steps))] = elements
    flat = [element for elements in alike.values() for element in elements]
    try:
        register(
            {
                f"w{i}": memory.as_strided(sizes, strides, start)
                for i, (start, sizes, strides) in enumerate(layouts)
            }
        )
        refused = False
    except PlanError:
        refused = True

    assert (len(flat) != len(set(flat))) == refused


def test_thousands_of_small_tensors_are_described_quickly() -> None:
    state_dict = {f"layers.{i}.weight": torch.zeros(256) for i in range(5000)}
    start = time.process_time()
    captured, registered = capture(state_dict), register(state_dict)
    seconds = time.process_time() - start

    assert captured.manifest == registered.manifest
    assert seconds < 1.0
