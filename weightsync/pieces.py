"""Which pieces of pushed tensors the entries of a state dict are; ties of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weightsync.errors import PlanError
from weightsync.names import translate
from weightsync.overlap import strides
from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.locate import Entry
    from weightsync.names import Part, Rule
    from weightsync.stretches import LocalBox


class Piece(NamedTuple):
    """A box of a pushed tensor, and the view of local memory that it is.

    ``entry`` is the index of the entry that it is a view of. ``name`` and ``shape``
    are those of the pushed tensor.
    """

    entry: int
    label: str
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    replica: int


def pieces_of(entries: Sequence[Entry], names: Sequence[Rule]) -> list[Piece]:
    """Cut entries into pieces of what is pushed, as rules for their names say.

    Where an entry is the whole of a pushed tensor, or a part without elements, its name
    is known even if this rank holds nothing of it; other parts of which a rank holds
    nothing are left out.

    Raises PlanError where rules do not fit; see ``names.translate``.
    """
    pieces: list[Piece] = []
    with torch.no_grad():
        if not names:
            for index, entry in enumerate(entries):
                pieces += [_same(index, entry, held) for held in entry.held]
            return pieces
        given: object = names
        if not isinstance(given, (list, tuple)):
            raise PlanError(f"names takes rules, in a list, not {given!r}")
        parts = translate(names, {entry.name: entry.shape for entry in entries})
        for index, entry in enumerate(entries):
            for part in parts[entry.name]:
                pieces += _parts(index, entry, part)
    return pieces


def ties(pieces: Sequence[Piece]) -> list[int | None]:
    """For each piece the index of the first that views exactly the same memory.

    An empty tensor has no address, so it is never tied.
    """
    at: dict[int, list[int]] = {}
    found: list[int | None] = []
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
        found.append(tie)
    return found


def _view(piece: Piece) -> tuple[object, ...]:
    """Equal for two pieces at one address if they are the same elements of the same."""
    tensor = piece.tensor
    return (
        *(tensor.dtype, tensor.shape, strides(tensor)),
        *(tensor.is_conj(), tensor.is_neg(), piece.shape, piece.box),
    )


def _same(index: int, entry: Entry, held: LocalBox) -> Piece:
    """A box of an entry as the same box of the pushed tensor of its name."""
    name, tensor, shape, _, replica = entry
    tensor = _cut(tensor, held.start, held.box.sizes)
    return Piece(index, repr(name), name, tensor, shape, held.box, replica)


def _parts(index: int, entry: Entry, part: Part) -> Iterator[Piece]:
    label = repr(entry.name)
    if part.name != entry.name:
        label += f" (as {part.name!r})"
    everything = part.region.sizes == entry.shape
    for box, local in entry.held:
        common = box.intersect(part.region)
        if common.empty and not (everything or part.region.empty):
            continue
        steps = zip(local, common.offsets, box.offsets, strict=True)
        start = tuple([at + mine - its for at, mine, its in steps])
        tensor = _turned(_cut(entry.tensor, start, common.sizes), part.dims)
        place = _box(part, common)
        yield Piece(index, label, part.name, tensor, part.shape, place, entry.replica)


def _box(part: Part, common: Box) -> Box:
    """A region of a tensor here, in the pushed tensor."""
    offsets: list[int] = []
    sizes: list[int] = []
    for dim, begin in zip(part.dims, part.offsets, strict=True):
        offsets.append(
            begin
            if dim is None
            else begin + common.offsets[dim] - part.region.offsets[dim]
        )
        sizes.append(1 if dim is None else common.sizes[dim])
    return Box(tuple(offsets), tuple(sizes))


def _cut(
    tensor: torch.Tensor, start: Sequence[int], sizes: tuple[int, ...]
) -> torch.Tensor:
    """View a box of a local tensor; the tensor itself where that is all of it."""
    if tensor.shape == sizes:
        return tensor
    for dim, (begin, size) in enumerate(zip(start, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin if size else 0, size)
    return tensor


def _turned(tensor: torch.Tensor, dims: tuple[int | None, ...]) -> torch.Tensor:
    """View a tensor with these of its dims, in this order; None is a new one of size 1.

    Dims that are not among them have size 1.
    """
    if dims == tuple(range(tensor.dim())):
        return tensor
    kept = [dim for dim in dims if dim is not None]
    dropped = [dim for dim in range(tensor.dim()) if dim not in kept]
    tensor = tensor.permute(*kept, *dropped)
    for _ in dropped:
        tensor = tensor.squeeze(-1)
    for place, dim in enumerate(dims):
        if dim is None:
            tensor = tensor.unsqueeze(place)
    return tensor
