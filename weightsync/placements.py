"""Which boxes of a tensor the placements of a DTensor put on a rank; pure."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

# torch has no public name for how FSDP2 cuts what tensor parallelism has cut.
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage] # no other
    _StridedShardOffsetMode,  # pyright: ignore[reportPrivateUsage] # no other
)

from weightsync.errors import PlanError, UnsupportedError
from weightsync.stretches import LocalBox, Stretch, boxes, chosen, part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from weightsync.spec import Box

__all__ = [
    "Replicate",
    "ShardPlacement",
    "arrangements",
    "copy_number",
    "local_boxes",
    "placed",
    "strided_shard",
]


def strided_shard(dim: int, *, split_factor: int) -> Placement:
    """Cut as FSDP2 cuts what tensor parallelism has cut into ``split_factor`` parts.

    Each of the parts is cut between the ranks of the mesh dim, so a rank may get rows
    that are apart.
    """
    placement: Placement = _StridedShard(dim, split_factor=split_factor)
    return placement


def placed(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[Box, ...]:
    """Return what the rank at a coordinate of a mesh holds of a tensor.

    There is one placement for each dim of the mesh. Mostly they leave one box, perhaps
    an empty one; a strided shard may leave several. They are in the order of the local
    tensor.

    Raises UnsupportedError for placements other than Replicate, Shard and strided
    shards, PlanError for a dim that the tensor does not have.
    """
    found = local_boxes(shape, mesh_shape, coordinate, placements)
    return tuple([box for box, _ in found])


def local_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[LocalBox, ...]:
    """Return what ``placed`` does, and where in the local tensor each box begins."""
    return arrangements(shape, mesh_shape, coordinate, placements)[0]


@lru_cache(maxsize=65536)
def arrangements(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[tuple[LocalBox, ...], ...]:
    """Return every answer that ``local_boxes`` could give, the likely one first.

    Where strided shards are uneven there are two answers. They stand for cuts that were
    made from right to left, which is what FSDP2 does and what the first answer tells;
    who takes them at their word and cuts from left to right gets the second.
    """
    for placement in placements:
        _check(placement, shape)
    steps = [
        (placement.dim % len(shape), size, at, placement)
        for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True)
        if isinstance(placement, (ShardPlacement, _StridedShard))
    ]
    ordered = _in_order(steps)
    if ordered is None:
        return (boxes(shape, _dims(shape, steps)),)
    likely = boxes(shape, _dims(shape, ordered))
    if _even(shape, steps):
        return (likely,)
    return tuple(dict.fromkeys((likely, boxes(shape, _dims(shape, steps)))))


def copy_number(
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> int:
    """Number the copies that a mesh holds of a tensor, along the replicating dims."""
    number = 0
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            number = number * size + at
    return number


_Step = tuple[int, int, int, "ShardPlacement | _StridedShard"]
"""A cut: the dim that is cut, in so many parts, and which of them is taken, how."""


def _check(placement: Placement, shape: tuple[int, ...]) -> None:
    if isinstance(placement, Replicate):
        return
    if not isinstance(placement, (ShardPlacement, _StridedShard)):
        raise UnsupportedError(
            f"placement {placement} is not supported; only Shard and Replicate are"
        )
    if not -len(shape) <= placement.dim < len(shape):
        raise PlanError(
            f"placement {placement} cuts a dim that shape {shape} does not have"
        )


def _in_order(steps: Sequence[_Step]) -> list[_Step] | None:
    """The cuts that strided shards stand for, in the order in which they were made.

    None where there are none, or where they stand for something else.
    """
    if not any(isinstance(step[3], _StridedShard) for step in steps):
        return None
    ordered: list[_Step] = []
    for dim, size, at, placement in reversed(steps):
        same = [step for step in ordered if step[0] == dim]
        others = [step for step in ordered if step[0] != dim]
        before = 0
        if isinstance(placement, _StridedShard):
            parts = list(accumulate([step[1] for step in same], mul, initial=1))
            if placement.split_factor not in parts:
                return None
            before = parts.index(int(placement.split_factor))
        same.insert(before, (dim, size, at, ShardPlacement(dim)))
        ordered = same + others
    return ordered


def _even(shape: tuple[int, ...], steps: Sequence[_Step]) -> bool:
    """Whether all parts are equal: then the order of cuts leaves one arrangement."""
    parts = [1] * len(shape)
    for dim, count, _, _ in steps:
        parts[dim] *= count
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))


def _dims(shape: tuple[int, ...], steps: Sequence[_Step]) -> list[list[Stretch]]:
    """What is left along each dim after some cuts."""
    dims = [[Stretch(0, size)] if size else [] for size in shape]
    for dim, parts, at, placement in steps:
        dims[dim] = _cut(dims[dim], parts, at, placement)
    return dims


def _cut(
    stretches: list[Stretch],
    parts: int,
    at: int,
    placement: ShardPlacement | _StridedShard,
) -> list[Stretch]:
    size = sum([stretch.size for stretch in stretches])
    if isinstance(placement, ShardPlacement):
        length, start = ShardPlacement.local_shard_size_and_offset(size, parts, at)
        return part(stretches, start, length)
    with torch.device("cpu"):  # It counts in tensors.
        _, indices = placement.local_shard_size_and_offset(
            size, parts, at, _StridedShardOffsetMode.ALL
        )
    return chosen(stretches, cast("list[int]", indices))
