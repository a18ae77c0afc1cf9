"""What a rank holds, as plain data that travels: boxes, pieces, manifests."""

from __future__ import annotations

import math
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from weightsync.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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

CONVERTIBLE: Final = frozenset(
    {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)
"""Dtypes that are converted into each other where a push allows it."""

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

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of all elements of a tensor."""
        return cls((0,) * len(shape), shape)

    def __str__(self) -> str:
        """Show it as the slices that it is."""
        spans = zip(self.offsets, self.sizes, strict=True)
        return f"[{', '.join(f'{start}:{start + size}' for start, size in spans)}]"


class Kind(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Which part of what tensor a piece is; most pieces of a model share a few kinds.

    ``dtype`` is torch's name without "torch."; ``shape`` is the global one. ``replica``
    tells the copies of a shard apart: all boxes of one number are one whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box
    replica: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the box, packed. Raises KeyError for a dtype not in ITEMSIZE."""
        return ITEMSIZE[self.dtype] * self.box.numel


class Place(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Where a piece lies in the storages of a generator rank, in bytes.

    ``storage`` is an index in ``storages`` of the manifest; ``strides`` has one number
    for each dimension of the box. That of an empty box means nothing.
    """

    storage: int
    offset: int
    strides: tuple[int, ...]


class TensorSpec(NamedTuple):
    """One piece: a tensor, or a part of one, that a rank holds.

    ``name`` and ``shape`` are those of the whole pushed tensor. ``tied`` is the index
    of an earlier piece of the same rank that views exactly the same memory. ``place``
    is known where a slot mirrors the storages of the rank; else pieces are packed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    tied: int | None = None
    replica: int = 0
    place: Place | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the box, packed. Raises KeyError for a dtype not in ITEMSIZE."""
        return ITEMSIZE[self.dtype] * self.box.numel


class Manifest(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True
):
    """Everything that one rank holds, piece by piece; a name may have several.

    ``kind_of[i]`` is the index in ``kinds`` of the piece ``names[i]``. ``ties`` are
    pairs of a piece and the earlier one that it shares its memory with. ``places`` has
    one entry for each piece, or none; ``storages`` are the bytes of each storage that
    they are in, which may be more than the pieces fill.
    """

    kinds: tuple[Kind, ...]
    names: tuple[str, ...]
    kind_of: tuple[int, ...]
    ties: tuple[tuple[int, int], ...] = ()
    places: tuple[Place, ...] = ()
    storages: tuple[int, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[TensorSpec], storages: Iterable[int] = ()) -> Manifest:
        """Build it from its pieces; all of them have a place, or none has."""
        pieces = tuple(pieces)
        kinds: dict[Kind, int] = {}
        kind_of: list[int] = []
        for piece in pieces:
            kind = Kind(piece.dtype, piece.shape, piece.box, piece.replica)
            kind_of.append(kinds.setdefault(kind, len(kinds)))
        ties = [(i, p.tied) for i, p in enumerate(pieces) if p.tied is not None]
        return cls(
            tuple(kinds),
            tuple([piece.name for piece in pieces]),
            tuple(kind_of),
            tuple(ties),
            tuple([piece.place for piece in pieces if piece.place is not None]),
            tuple(storages),
        )

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal where manifests are equal, on every machine."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    @cached_property
    def roots(self) -> Sequence[int]:
        """For each piece the index of the first that views the same memory."""
        if not self.ties:
            return range(len(self.names))
        roots = list(range(len(self.names)))
        for index, other in self.ties:
            roots[index] = roots[other]
        return roots

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The pieces, in order."""
        ties = dict(self.ties)
        places = self.places or (None,) * len(self.names)
        rows = zip(self.names, self.kind_of, places, strict=True)
        return tuple(
            [
                _spec(name, self.kinds[kind], ties.get(index), place)
                for index, (name, kind, place) in enumerate(rows)
            ]
        )


def _spec(name: str, kind: Kind, tied: int | None, place: Place | None) -> TensorSpec:
    return TensorSpec(name, kind.dtype, kind.shape, kind.box, tied, kind.replica, place)


def validate_manifest(manifest: Manifest, *, columns: bool = True) -> None:
    """Check what came off the wire; types were checked when it was decoded.

    Without ``columns`` only kinds and ties are checked: for a manifest with the other
    columns, and the dtypes and sizes of boxes, of one that is good.

    Raises ProtocolError for an unknown dtype, a box that is not inside its shape, a
    kind, tie or place that is not there, a tie to anything but an earlier piece that is
    alike, and a place that is not inside its storage.
    """
    for kind in manifest.kinds:
        fault = _kind_fault(kind)
        if fault is not None:
            raise ProtocolError(f"manifest: {kind}: {fault}")
    fault = (_columns_fault(manifest) or _places_fault(manifest)) if columns else None
    fault = fault or _ties_fault(manifest)
    if fault is not None:
        raise ProtocolError(f"manifest: {fault}")


def _kind_fault(kind: Kind) -> str | None:
    shape, box = kind.shape, kind.box
    if kind.dtype not in ITEMSIZE:
        return f"dtype {kind.dtype!r} is unknown"
    if not len(shape) == len(box.offsets) == len(box.sizes) <= MAX_DIMS:
        return (
            f"shape {shape}, offsets {box.offsets} and sizes {box.sizes} must have "
            f"the same number of dimensions, at most {MAX_DIMS}"
        )
    for whole, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            return f"box {box} is not inside shape {shape}"
    if ITEMSIZE[kind.dtype] * math.prod(shape) > MAX_BYTES:
        return f"shape {shape} has more bytes than can be addressed"
    return None


def _columns_fault(manifest: Manifest) -> str | None:
    if len(manifest.kind_of) != len(manifest.names):
        return f"{len(manifest.names)} names, but kinds for {len(manifest.kind_of)}"
    known = range(len(manifest.kinds))
    wrong = [kind for kind in set(manifest.kind_of) if kind not in known]
    return f"no kind {wrong[0]}" if wrong else None


def _ties_fault(manifest: Manifest) -> str | None:
    last = -1
    for index, other in manifest.ties:
        if not last < index < len(manifest.names):
            return f"a tie of piece {index} after one of piece {last}"
        last = index
        if not 0 <= other < index:
            return f"piece {index} is tied to {other}, which is no earlier one"
        mine, its = (
            manifest.kinds[manifest.kind_of[index]],
            manifest.kinds[manifest.kind_of[other]],
        )
        if (mine.dtype, mine.shape, mine.box) != (its.dtype, its.shape, its.box):
            return (
                f"tensor {manifest.names[index]!r} is tied to "
                f"{manifest.names[other]!r}, which has another dtype, shape or box"
            )
    return None


def _places_fault(manifest: Manifest) -> str | None:
    sizes = manifest.storages
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_BYTES:
        return "storages of more bytes than can be addressed, or of fewer than none"
    if not manifest.places:
        return "storages, but no places" if sizes else None
    if len(manifest.places) != len(manifest.names):
        return f"{len(manifest.names)} names, but places for {len(manifest.places)}"
    sizes = sizes or (0,)  # empty boxes lie in the first, if there is none too
    for kind, place in zip(manifest.kind_of, manifest.places, strict=True):
        fault = _place_fault(manifest.kinds[kind], place, sizes)
        if fault is not None:
            return fault
    return None


def _place_fault(kind: Kind, place: Place, sizes: Sequence[int]) -> str | None:
    box, strides = kind.box, place.strides
    if len(strides) != len(box.sizes) or min(place.offset, *strides, 0) < 0:
        return f"{place} is no place of a box {box}"
    if not 0 <= place.storage < len(sizes):
        return f"{place} is in no storage of {len(sizes)}"
    end = place.offset
    if not box.empty:
        steps = zip(box.sizes, strides, strict=True)
        end += sum([(n - 1) * step for n, step in steps]) + ITEMSIZE[kind.dtype]
    if end > sizes[place.storage]:
        return (
            f"{place} of a box {box} ends at byte {end} of a storage of "
            f"{sizes[place.storage]}"
        )
    return None
