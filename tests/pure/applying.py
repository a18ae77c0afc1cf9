"""Fills tensors from parts, by plain indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightsync.names import translate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightsync.names import Part, Rule

SENTINEL = -7.0


def indices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))


def apply(part: Part, here: torch.Tensor, pushed: torch.Tensor) -> None:
    """Copy what the part says; dims that only one side has are of size 1."""
    assert part.shape == tuple(pushed.shape)
    source = pushed[indices(part.box.offsets, part.box.sizes)]
    target = here[indices(part.region.offsets, part.region.sizes)]
    assert part.box.sizes == tuple(source.shape)
    assert part.region.sizes == tuple(target.shape)
    kept = [dim for dim in part.dims if dim is not None]
    assert kept == sorted(set(kept))
    for dim in reversed(range(source.dim())):
        if part.dims[dim] is None:
            source = source.squeeze(dim)
    for dim in reversed(range(target.dim())):
        if dim not in kept:
            target = target.squeeze(dim)
    target.copy_(source)


def fill(
    rules: Sequence[Rule],
    shapes: Mapping[str, Sequence[int]],
    pushed: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Make every tensor here out of sentinels and what the rules take."""
    translated = translate(
        rules, {name: tuple(shape) for name, shape in shapes.items()}
    )
    filled: dict[str, torch.Tensor] = {}
    for name, parts in translated.items():
        here = torch.full(tuple(shapes[name]), SENTINEL)
        for part in parts:
            apply(part, here, pushed[part.name])
        filled[name] = here
    return filled


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    """Make a tensor whose elements all differ."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def same_bytes(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> bool:
    return expected.keys() == actual.keys() and all(
        tensor.shape == actual[name].shape
        and tensor.dtype == actual[name].dtype
        and torch.equal(raw(tensor), raw(actual[name]))
        for name, tensor in expected.items()
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
