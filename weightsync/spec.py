"""What a rank holds, as plain data that travels: boxes, tensors, manifests."""

from __future__ import annotations

import math
from functools import cached_property
from hashlib import blake2b
from typing import Final

import msgspec

from weightsync.errors import ProtocolError

ITEMSIZE: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "bcomplex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every dtype that is moved, by torch's name without "torch.".

Not here, so refused: quantized dtypes, which carry scales beside their bytes, and
integers below 8 bits, which torch cannot copy.
"""

MAX_DIMS: Final = 64
"""Torch holds no tensor of more dimensions."""

MAX_BYTES: Final = 2**63 - 1
"""Offsets are signed 64-bit integers wherever they meet C."""


class Box(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """A shard's place in the global tensor, in elements; a 0-dim box holds one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def empty(self) -> bool:
        """Whether there is no element in it."""
        return 0 in self.sizes

    def intersect(self, other: Box) -> Box:
        """Return what both hold, perhaps empty; both have the same rank.

        Raises ValueError where the ranks differ.
        """
        spans = [
            (max(mine, theirs), min(mine + size, theirs + their_size))
            for mine, size, theirs, their_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        ]
        return Box(
            tuple([start for start, _ in spans]),
            tuple([stop - start if stop > start else 0 for start, stop in spans]),
        )

    def __str__(self) -> str:
        """Show it as the slices that it is."""
        spans = zip(self.offsets, self.sizes, strict=True)
        return f"[{', '.join(f'{start}:{start + size}' for start, size in spans)}]"


class TensorSpec(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """One tensor, or the shard of one, that a rank holds.

    ``dtype`` is torch's name without "torch."; ``shape`` is the global one; ``tied``
    names an earlier tensor of the same manifest that views exactly the same memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    tied: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the box, packed. Raises KeyError for a dtype not in ITEMSIZE."""
        return ITEMSIZE[self.dtype] * self.box.numel


class Manifest(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True
):
    """Everything that one rank holds, in the order of its state dict."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal where manifests are equal, on every machine."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple([tensor.name for tensor in self.tensors])

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """Each tensor under its name."""
        return {tensor.name: tensor for tensor in self.tensors}


def validate_manifest(manifest: Manifest) -> None:
    """Check what came off the wire; types were checked when it was decoded.

    Raises ProtocolError for an unknown dtype, a box that is not inside its shape, a
    name given twice, or a tie to anything but an earlier tensor that is alike.
    """
    earlier: dict[str, TensorSpec] = {}
    for tensor in manifest.tensors:
        fault = _fault(tensor, earlier)
        if fault is not None:
            raise ProtocolError(f"manifest: tensor {tensor.name!r}: {fault}")
        earlier[tensor.name] = tensor


def _fault(tensor: TensorSpec, earlier: dict[str, TensorSpec]) -> str | None:
    if tensor.name in earlier:
        return "its name is given twice"
    if tensor.dtype not in ITEMSIZE:
        return f"dtype {tensor.dtype!r} is unknown"
    return _box_fault(tensor) or _tie_fault(tensor, earlier)


def _box_fault(tensor: TensorSpec) -> str | None:
    shape, box = tensor.shape, tensor.box
    if not len(shape) == len(box.offsets) == len(box.sizes) <= MAX_DIMS:
        return (
            f"shape {shape}, offsets {box.offsets} and sizes {box.sizes} must have "
            f"the same number of dimensions, at most {MAX_DIMS}"
        )
    for whole, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            return f"box {box} is not inside shape {shape}"
    if ITEMSIZE[tensor.dtype] * math.prod(shape) > MAX_BYTES:
        return f"shape {shape} has more bytes than can be addressed"
    return None


def _tie_fault(tensor: TensorSpec, earlier: dict[str, TensorSpec]) -> str | None:
    if tensor.tied is None:
        return None
    other = earlier.get(tensor.tied)
    if other is None:
        return f"it is tied to {tensor.tied!r}, which is no earlier tensor"
    if (tensor.dtype, tensor.shape, tensor.box) != (
        other.dtype,
        other.shape,
        other.box,
    ):
        return f"it is tied to {tensor.tied!r}, which has another dtype, shape or box"
    return None
