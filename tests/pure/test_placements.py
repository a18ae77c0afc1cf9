"""Placements on a mesh, compared with cutting a tensor of numbers."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import PlanError, UnsupportedError
from weightsync.placements import (
    Replicate,
    ShardPlacement,
    arrangements,
    copy_number,
    local_boxes,
    placed,
    strided_shard,
)
from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement

    from weightsync.stretches import LocalBox

Case = tuple[tuple[int, ...], tuple[int, ...], tuple["Placement", ...]]


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def chunk(tensor: Tensor, dim: int, parts: int, at: int) -> Tensor:
    chunks = tensor.chunk(parts, dim)
    return chunks[at] if at < len(chunks) else tensor.narrow(dim, 0, 0)


def by_word(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Sequence[Placement],
) -> Tensor:
    """The local tensor if every placement cuts what the ones before it have left."""
    local = numbers(shape)
    for parts, at, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, ShardPlacement):
            local = chunk(local, placement.dim, parts, at)
        elif isinstance(placement, _StridedShard):
            dim = placement.dim
            groups = [
                chunk(local, dim, placement.split_factor, group)
                for group in range(placement.split_factor)
            ]
            local = torch.cat([chunk(group, dim, parts, at) for group in groups], dim)
    return local


def assembled(shape: tuple[int, ...], held: Sequence[LocalBox]) -> Tensor:
    """The local tensor that has these boxes at these places."""
    whole = numbers(shape)
    ends = [
        [start + size for start, size in zip(local, box.sizes, strict=True)]
        for box, local in held
    ]
    sizes = [max(column) for column in zip(*ends, strict=True)]
    found = torch.full(sizes, -1)
    for box, local in held:
        there = tuple(
            slice(start, start + size)
            for start, size in zip(box.offsets, box.sizes, strict=True)
        )
        here = tuple(
            slice(start, start + size)
            for start, size in zip(local, box.sizes, strict=True)
        )
        assert (found[here] == -1).all()
        found[here] = whole[there]
    return found


@st.composite
def cases(draw: st.DrawFn, *, strided: bool) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = ["copy", "shard", "strided"] if strided else ["copy", "shard"]
    placements: list[Placement] = []
    for _ in mesh:
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "copy":
            placements.append(Replicate())
        elif kind == "shard":
            placements.append(ShardPlacement(dim))
        else:
            placements.append(strided_shard(dim, split_factor=draw(st.integers(2, 4))))
    return shape, mesh, tuple(placements)


@given(cases(strided=False))
def test_shards_lie_where_cutting_puts_them(case: Case) -> None:
    shape, mesh, placements = case
    for coordinate in product(*map(range, mesh)):
        held = local_boxes(shape, mesh, coordinate, placements)
        expected = by_word(shape, mesh, coordinate, placements)

        assert 1 == len(held)
        assert tuple(expected.shape) == held[0].box.sizes
        assert expected.tolist() == assembled(shape, held).tolist()


@given(cases(strided=True))
def test_one_arrangement_is_what_the_placements_say_by_word(case: Case) -> None:
    shape, mesh, placements = case
    for coordinate in product(*map(range, mesh)):
        held = arrangements(shape, mesh, coordinate, placements)[-1]
        expected = by_word(shape, mesh, coordinate, placements)

        assert expected.tolist() == assembled(shape, held).tolist()


@given(cases(strided=True))
def test_the_ranks_of_each_copy_hold_every_element_once(case: Case) -> None:
    shape, mesh, placements = case
    copies: dict[int, list[int]] = {}
    for coordinate in product(*map(range, mesh)):
        held = local_boxes(shape, mesh, coordinate, placements)
        elements = assembled(shape, held).flatten().tolist()
        copies.setdefault(copy_number(mesh, coordinate, placements), []).extend(
            elements
        )

    whole = numbers(shape).flatten().tolist()
    assert {tuple(whole)} == {tuple(sorted(copy)) for copy in copies.values()}


@given(st.integers(0, 24), st.integers(1, 5), st.integers(1, 5))
def test_fsdp_over_tensor_parallel_cuts_the_tensor_parallel_parts(
    rows: int, data: int, tensor: int
) -> None:
    whole = numbers((rows, 2))
    placements = (strided_shard(0, split_factor=tensor), ShardPlacement(0))
    for dp, tp in product(range(data), range(tensor)):
        held = local_boxes((rows, 2), (data, tensor), (dp, tp), placements)
        expected = chunk(chunk(whole, 0, tensor, tp), 0, data, dp)

        assert expected.tolist() == assembled((rows, 2), held).tolist()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, {(0, 0): [0, 1], (0, 1): [4, 5], (1, 0): [2, 3], (1, 1): [6, 7]}),
        (5, {(0, 0): [0, 1], (0, 1): [3], (1, 0): [2], (1, 1): [4]}),
    ],
)
def test_rows_of_fsdp_over_tensor_parallel(
    rows: int, expected: dict[tuple[int, ...], list[int]]
) -> None:
    placements = (strided_shard(0, split_factor=2), ShardPlacement(0))
    found = {
        at: assembled((rows,), local_boxes((rows,), (2, 2), at, placements)).tolist()
        for at in product(range(2), range(2))
    }

    assert expected == found


def test_a_strided_shard_alone_leaves_rows_that_are_apart() -> None:
    placements = (strided_shard(0, split_factor=3),)

    expected = (Box((1, 0), (1, 4)), Box((3, 0), (1, 4)), Box((5, 0), (1, 4)))
    assert expected == placed((6, 4), (2,), (1,), placements)


def test_copies_are_numbered_along_the_dims_that_replicate() -> None:
    placements = (Replicate(), ShardPlacement(0), Replicate())
    found = [copy_number((2, 2, 3), at, placements) for at in ((0, 1, 2), (1, 0, 1))]

    assert [2, 4] == found


def test_what_no_rank_can_hold_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"P\(sum\) is not supported"):
        placed((4,), (2,), (0,), (Partial(),))
    with pytest.raises(PlanError, match=r"cuts a dim that shape \(4,\) does not have"):
        placed((4,), (2,), (0,), (ShardPlacement(1),))


def test_a_dim_may_be_counted_from_the_end() -> None:
    expected = placed((4, 6), (2,), (1,), (ShardPlacement(1),))

    assert expected == placed((4, 6), (2,), (1,), (ShardPlacement(-1),))
