"""State dict to manifest and local memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from weightsync.errors import PlanError, UnsupportedError
from weightsync.locate import DTYPES, Shard, StateDict, located, named
from weightsync.names import canonical, ignored
from weightsync.overlap import check_overlap
from weightsync.pieces import Piece, pieces_of, ties
from weightsync.spec import Manifest, TensorSpec
from weightsync.storages import Storages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.names import Rule
    from weightsync.spec import Place

__all__ = [
    "Captured",
    "Registered",
    "Shard",
    "StateDict",
    "capture",
    "captured",
    "carried",
    "kept",
    "register",
]

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Copied as these: torch's own copy of complex32 changes NaNs, and that of bool."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What a trainer rank pushes.

    ``tensors[i]`` is contiguous, and its bytes are exactly the box of
    ``manifest.tensors[i]`` in row-major order. Where the caller's memory was so already
    it is the same memory, otherwise a copy.
    """

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """What a generator rank receives into.

    ``entries`` are the caller's own tensors, by their canonical names. ``tensors[i]``
    is one of them or a view of one: the piece ``manifest.tensors[i]``, which errors
    call ``labels[i]``. ``storages`` are the storages that the places of the manifest
    tell of, as bytes; where several storages are the same memory, all of them.
    """

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]
    labels: tuple[str, ...]
    entries: Mapping[str, torch.Tensor]
    storages: tuple[tuple[torch.Tensor, ...], ...]


def capture(
    state_dict: StateDict, *, ignore: Sequence[str] = (), names: Sequence[Rule] = ()
) -> Captured:
    """Describe what a trainer rank holds, as it can be moved byte by byte.

    Entries that match a pattern of ``ignore``, by their own or by their canonical
    name, are left out; so are DTensors whose mesh this rank is not part of. The rules
    of ``names`` say which pushed tensors the others are. Names that share memory are
    tied. Nothing is communicated and no tensor is changed.

    Raises DtypeError for what is no tensor or has a dtype that cannot be moved,
    UnsupportedError for a kind of tensor or a device that cannot, and PlanError for
    names that become one, for shards that do not fit their global shape, for rules
    that do not fit, and for what is no state dict; each names the entry.
    """
    entries = located(kept(named(state_dict), ignore))
    return captured(pieces_of(entries, names))


def kept(
    state_dict: Mapping[str, object], ignore: Sequence[str]
) -> Mapping[str, object]:
    """Leave out what matches a pattern."""
    if isinstance(ignore, str):
        raise PlanError(f"ignore is a list of patterns, not the str {ignore!r}")
    if not ignore:
        return state_dict
    names = [name for name in state_dict if not _is_ignored(name, ignore)]
    return {name: state_dict[name] for name in names}


def captured(pieces: Sequence[Piece]) -> Captured:
    """Pack pieces that are not contiguous, and describe all of them."""
    tied = ties(pieces)
    tensors: list[torch.Tensor] = []
    for piece, tie in zip(pieces, tied, strict=True):
        tensors.append(_packed(piece.tensor) if tie is None else tensors[tie])
    return Captured(_manifest(pieces, tied), tuple(tensors))


def register(
    state_dict: StateDict, *, names: Sequence[Rule] = (), mirrored: bool = False
) -> Registered:
    """Describe what a generator rank receives into; accepts ``Shard`` too.

    Pieces that view exactly the same memory are tied. ``mirrored`` also says where they
    lie in the storages of this rank.

    Raises what ``capture`` raises; UnsupportedError for a tensor that is lazily
    conjugated or negated; and PlanError for an empty state dict, a tensor whose
    elements share memory with each other, and two tensors that share only part of
    their memory.
    """
    entries = located(named(state_dict))
    pieces = pieces_of(entries, names)
    if not pieces:
        raise PlanError("register: the state dict holds no tensor")
    for piece in pieces:
        if piece.tensor.is_conj() or piece.tensor.is_neg():
            raise UnsupportedError(
                f"{piece.label}: cannot receive into a lazily conjugated or negated "
                f"view; register the tensor that it views"
            )
    tied = ties(pieces)
    untied = [p for p, tie in zip(pieces, tied, strict=True) if tie is None]
    check_overlap([(piece.label, piece.tensor) for piece in untied])
    storages = Storages()
    places = storages.places(pieces) if mirrored else None
    return Registered(
        _manifest(pieces, tied, places, storages.sizes),
        tuple([piece.tensor for piece in pieces]),
        tuple([piece.label for piece in pieces]),
        {entry.name: entry.tensor for entry in entries if entry.held},
        storages.all,
    )


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a dtype of the same size whose copies keep every bit."""
    return tensor.view(_CARRIERS.get(tensor.itemsize, tensor.dtype))


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return ignored(name, patterns) or ignored(canonical(name), patterns)


def _manifest(
    pieces: Sequence[Piece],
    tied: Sequence[int | None],
    places: Sequence[Place] | None = None,
    storages: Sequence[int] = (),
) -> Manifest:
    specs: list[TensorSpec] = []
    for index, (piece, tie) in enumerate(zip(pieces, tied, strict=True)):
        dtype = DTYPES[piece.tensor.dtype]
        place = None if places is None else places[index]
        whole = piece.name, dtype, piece.shape
        specs.append(TensorSpec(*whole, piece.box, tie, piece.replica, place))
    return Manifest.of(specs, storages)


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
