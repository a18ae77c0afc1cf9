"""The weights of the chaos suite: their bytes follow from the version and the name."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch

import weightsync

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SENTINEL = 0xA5
COLUMNS = 128

Box = tuple[slice, ...]


class Whole(NamedTuple):
    """A tensor of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def model(rows: int) -> dict[str, Whole]:
    """Return the tensors of a model: about ``rows`` times 320 bytes."""
    return {
        "layer.weight": Whole((rows, COLUMNS), torch.bfloat16),
        "layer.bias": Whole((COLUMNS,), torch.float32),
        "embed": Whole((rows, 64), torch.uint8),
    }


def trainer_boxes(rows: int, rank: int, world: int) -> dict[str, Box]:
    """Return what a trainer rank has: parts by rows, copies, and tensors of its own."""
    boxes = {
        "layer.weight": (_part(rows, rank, world), slice(0, COLUMNS)),
        "layer.bias": (slice(0, COLUMNS),),
    }
    if rank == world - 1:
        boxes["embed"] = (slice(0, rows), slice(0, 64))
    return boxes


def generator_boxes(rows: int, rank: int, world: int) -> dict[str, Box]:
    """Return what a generator rank has: parts by columns and by rows, and copies."""
    return {
        "layer.weight": (slice(0, rows), _part(COLUMNS, rank, world)),
        "layer.bias": (slice(0, COLUMNS),),
        "embed": (_part(rows, rank, world), slice(0, 64)),
    }


def _part(size: int, rank: int, world: int) -> slice:
    return slice(size * rank // world, size * (rank + 1) // world)


class Weights:
    """Some boxes of the model in the memory of one rank."""

    def __init__(self, rows: int, boxes: Mapping[str, Box], device: str) -> None:
        wholes = model(rows)
        self._bases: dict[str, Tensor] = {}
        self.state: dict[str, weightsync.Shard] = {}
        for name, box in boxes.items():
            whole = wholes[name]
            base = _base(name, whole)[box].contiguous()
            memory = torch.full_like(_bytes(base), SENTINEL).to(device)
            self._bases[name] = _bytes(base)
            self.state[name] = weightsync.Shard(
                memory.view(base.dtype).view(base.shape),
                global_shape=whole.shape,
                offsets=tuple(part.start for part in box),
            )

    def fill(self, version: int) -> None:
        """Give every tensor the bytes of a version."""
        for name, base in self._bases.items():
            _bytes(self.state[name].tensor).copy_(base + _shift(version))

    def wrong(self, version: int | None) -> list[str]:
        """Return the names whose bytes are not exactly those of a version.

        None stands for tensors that nothing was written to yet.
        """
        return [name for name in self._bases if not self._exact(name, version)]

    def _exact(self, name: str, version: int | None) -> bool:
        base, found = self._bases[name], _bytes(self.state[name].tensor).cpu()
        if version is None:
            return bool((found == SENTINEL).all())
        return torch.equal(found, base + _shift(version))


def _shift(version: int) -> int:
    """Return what is added to every byte: differs for 256 versions in a row."""
    return 37 * version % 256


def _base(name: str, whole: Whole) -> Tensor:
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    count = torch.Size(whole.shape).numel() * whole.dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=seeded)
    return data.view(whole.dtype).view(whole.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
