"""State dict to manifest and local memory; the only file that knows DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from weightsync.errors import DtypeError, PlanError, UnsupportedError
from weightsync.names import canonical, canonical_names, ignored
from weightsync.overlap import check_overlap, strides
from weightsync.spec import ITEMSIZE, Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor import DTensor

_DTYPES: Final[dict[torch.dtype, str]] = {
    getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)
}

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Copied as these: torch's own copy of complex32 changes NaNs, and that of bool."""

_DISPATCH: Final = "__torch_dispatch__"
"""Where a class has its own, what it shows of memory need not be true."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor that its owner cut himself: where it lies in the global tensor.

    ``global_shape`` and ``offsets`` are in elements, one number per dimension.
    """

    tensor: torch.Tensor
    _: KW_ONLY
    global_shape: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Captured:
    """What a trainer rank pushes.

    ``tensors[i]`` is contiguous, and its bytes are exactly the box of
    ``manifest.tensors[i]`` in row-major order. Where the caller's tensor was so
    already it is the same memory, otherwise a copy.
    """

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """What a generator rank receives into: the caller's own tensors, as they are."""

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]


def capture(
    state_dict: Mapping[str, object], *, ignore: Sequence[str] = ()
) -> Captured:
    """Describe what a trainer rank holds, as it can be moved byte by byte.

    Entries that match a pattern of ``ignore``, by their own or by their canonical
    name, are left out; so are DTensors whose mesh this rank is not part of. Names
    that share memory are tied. Nothing is communicated and no tensor is changed.

    Raises DtypeError for what is no tensor or has a dtype that cannot be moved,
    UnsupportedError for a kind of tensor or a device that cannot, and PlanError for
    names that become one, for shards that do not fit their global shape, and for what
    is no mapping from str; each names the entry.
    """
    _check_mapping(state_dict)
    if isinstance(ignore, str):
        raise PlanError(f"ignore is a list of patterns, not the str {ignore!r}")
    kept = state_dict
    if ignore:
        names = [name for name in state_dict if not _is_ignored(name, ignore)]
        kept = {name: state_dict[name] for name in names}
    pieces = _pieces(kept)
    ties = _ties(pieces)
    tensors: list[torch.Tensor] = []
    for piece, tie in zip(pieces, ties, strict=True):
        tensors.append(_packed(piece.tensor) if tie is None else tensors[tie])
    return Captured(_manifest(pieces, ties), tuple(tensors))


def register(state_dict: Mapping[str, object]) -> Registered:
    """Describe what a generator rank receives into; accepts ``Shard`` too.

    Names that view exactly the same memory are tied.

    Raises what ``capture`` raises; UnsupportedError for a tensor that is lazily
    conjugated or negated; and PlanError for an empty state dict, a tensor whose
    elements share memory with each other, and two tensors that share only part of
    their memory.
    """
    _check_mapping(state_dict)
    pieces = _pieces(state_dict)
    if not pieces:
        raise PlanError("register: the state dict holds no tensor")
    for piece in pieces:
        if piece.tensor.is_conj() or piece.tensor.is_neg():
            raise UnsupportedError(
                f"{piece.name!r}: cannot receive into a lazily conjugated or negated "
                f"view; register the tensor that it views"
            )
    ties = _ties(pieces)
    untied = [p for p, tie in zip(pieces, ties, strict=True) if tie is None]
    check_overlap([(piece.name, piece.tensor) for piece in untied])
    return Registered(_manifest(pieces, ties), tuple([p.tensor for p in pieces]))


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a dtype of the same size whose copies keep every bit."""
    return tensor.view(_CARRIERS.get(tensor.itemsize, tensor.dtype))


class _Piece(NamedTuple):
    """One entry of a state dict: the local tensor and where it lies."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return ignored(name, patterns) or ignored(canonical(name), patterns)


def _manifest(pieces: Sequence[_Piece], ties: Sequence[int | None]) -> Manifest:
    return Manifest(
        tuple(
            [
                TensorSpec(
                    piece.name,
                    _DTYPES[piece.tensor.dtype],
                    piece.shape,
                    piece.box,
                    None if tie is None else pieces[tie].name,
                )
                for piece, tie in zip(pieces, ties, strict=True)
            ]
        )
    )


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor
    return carried(tensor).contiguous().view(tensor.dtype)


# What may be moved


def _check_mapping(state_dict: Mapping[str, object]) -> None:
    given: object = state_dict
    if not isinstance(given, Mapping):
        raise PlanError(f"a state dict is a mapping, not a {type(given).__qualname__}")
    for name in state_dict:
        key: object = name
        if not isinstance(key, str):
            raise PlanError(
                f"a name is a str, not the {type(key).__qualname__} {key!r}"
            )


def _pieces(state_dict: Mapping[str, object]) -> list[_Piece]:
    names = canonical_names(state_dict)
    locate = _Locator()
    pieces: list[_Piece] = []
    with torch.no_grad():
        for name, value in state_dict.items():
            piece = locate(names[name], value)
            if piece is not None:
                pieces.append(piece)
    return pieces


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise UnsupportedError(
            f"{name!r}: is on device {str(tensor.device)!r}; only the CPU is supported"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedError(f"{name!r}: a {kind} tensor cannot be moved")
    if tensor.dtype not in _DTYPES:
        error = UnsupportedError if tensor.is_quantized else DtypeError
        raise error(f"{name!r}: {tensor.dtype} cannot be moved as bytes")
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        raise UnsupportedError(f"{name!r}: has no memory; its storage was freed")


class _Locator:
    """Finds the local tensor of an entry, and its place in the global one."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[object, ...], Box] = {}

    def __call__(self, name: str, value: object) -> _Piece | None:
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            _check_kind(name, value)
            shape = tuple(value.shape)
            return _Piece(name, value, shape, Box((0,) * len(shape), shape))
        if isinstance(value, Shard):
            return self._shard(name, value)
        if not isinstance(value, torch.Tensor):
            raise DtypeError(
                f"{name!r}: is a {type(value).__qualname__} and not a tensor; "
                f"only tensors are moved"
            )
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            return self._dtensor(name, value)
        shape = tuple(_plain(name, value).shape)
        return _Piece(name, value, shape, Box((0,) * len(shape), shape))

    def _shard(self, name: str, shard: Shard) -> _Piece:
        tensor = _plain(name, shard.tensor)
        shape = tuple(shard.global_shape)
        box = Box(tuple(shard.offsets), tuple(tensor.shape))
        _check_inside(name, box, shape)
        return _Piece(name, tensor, shape, box)

    def _dtensor(self, name: str, value: DTensor) -> _Piece | None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as ShardPlacement

        for placement in value.placements:
            if type(placement) not in (Replicate, ShardPlacement):
                raise UnsupportedError(
                    f"{name!r}: DTensor placement {placement} is not supported; "
                    f"only Shard and Replicate are"
                )
        if value.device_mesh.get_coordinate() is None:
            return None
        local = _plain(name, value.to_local())
        shape = tuple(value.shape)
        box = self._box(shape, value)
        if tuple(local.shape) != box.sizes:
            raise PlanError(
                f"{name!r}: the local tensor has shape {tuple(local.shape)}, but "
                f"global shape {shape} and placements {value.placements} give this "
                f"rank {box.sizes}"
            )
        return _Piece(name, local, shape, box)

    def _box(self, shape: tuple[int, ...], value: DTensor) -> Box:
        """Where the local tensor lies; kept, since torch takes about 50 us to tell."""
        from torch.distributed.tensor._utils import (
            compute_local_shape_and_global_offset,
        )

        mesh = value.device_mesh
        key = (shape, id(mesh), value.placements)
        if key not in self._boxes:
            sizes, offsets = compute_local_shape_and_global_offset(
                shape, mesh, value.placements
            )
            self._boxes[key] = Box(tuple(offsets), tuple(sizes))
        return self._boxes[key]


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unless it is a face of something else or cannot be moved."""
    if is_lazy(tensor):
        raise UnsupportedError(f"{name!r}: is not initialized yet")
    kind = type(tensor)
    if getattr(kind, _DISPATCH) is not getattr(torch.Tensor, _DISPATCH):
        raise UnsupportedError(f"{name!r}: a {kind.__qualname__} cannot be moved")
    _check_kind(name, tensor)
    return tensor


def _check_inside(name: str, box: Box, shape: tuple[int, ...]) -> None:
    fits = len(box.sizes) == len(shape) == len(box.offsets) and all(
        0 <= offset <= offset + size <= whole
        for size, whole, offset in zip(box.sizes, shape, box.offsets, strict=True)
    )
    if not fits:
        raise PlanError(
            f"{name!r}: a shard of shape {box.sizes} at offsets {box.offsets} is not "
            f"inside global shape {shape}"
        )


# Ties


def _view(piece: _Piece) -> tuple[object, ...]:
    """Equal for two pieces at one address if they are the same elements of the same."""
    tensor = piece.tensor
    return (
        *(tensor.dtype, tensor.shape, strides(tensor)),
        *(tensor.is_conj(), tensor.is_neg(), piece.shape, piece.box),
    )


def _ties(pieces: Sequence[_Piece]) -> list[int | None]:
    """For each piece the index of the first that views exactly the same memory.

    An empty tensor has no address, so it is never tied.
    """
    at: dict[int, list[int]] = {}
    ties: list[int | None] = []
    for index, piece in enumerate(pieces):
        tie = None
        if 0 not in piece.box.sizes:
            others = at.setdefault(piece.tensor.data_ptr(), [])
            if others:
                view = _view(piece)
                alike = (other for other in others if _view(pieces[other]) == view)
                tie = next(alike, None)
            if tie is None:
                others.append(index)
        ties.append(tie)
    return ties
