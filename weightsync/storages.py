"""Where the pieces of a generator rank lie in its storages."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from weightsync.errors import UnsupportedError
from weightsync.overlap import strides
from weightsync.spec import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.pieces import Piece

_Address = tuple[int, int]
"""Where a storage begins, and how many bytes it has."""


class Storages:
    """Storages, in the order in which pieces lie in them.

    Different storages may be the same memory, as those of two tensors made from one
    array; they count as one.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Address, int] = {}
        self._storages: list[dict[int, torch.Tensor]] = []
        self._labels: list[str] = []

    @property
    def all(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The storages of each number, as bytes."""
        return tuple([tuple(same.values()) for same in self._storages])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each number."""
        return tuple([nbytes for _, nbytes in self._numbers])

    def places(self, pieces: Sequence[Piece]) -> list[Place]:
        """Return where each piece lies.

        Raises UnsupportedError where pieces lie in storages that are the same memory
        only in part: these could not be exchanged together.
        """
        places = [
            Place(0, 0, (0,) * len(piece.box.sizes))
            if piece.box.empty
            else self._place(piece)
            for piece in pieces
        ]
        self._check_apart()
        return places

    def _place(self, piece: Piece) -> Place:
        tensor = piece.tensor
        storage: Any = tensor.untyped_storage()
        address = storage.data_ptr(), storage.nbytes()
        number = self._numbers.setdefault(address, len(self._numbers))
        if number == len(self._storages):
            self._storages.append({})
            self._labels.append(piece.label)
        same = self._storages[number]
        if storage._cdata not in same:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                storage
            )
            same[storage._cdata] = whole
        size = tensor.itemsize
        steps = tuple([step * size for step in strides(tensor)])
        return Place(number, int(tensor.storage_offset()) * size, steps)

    def _check_apart(self) -> None:
        ordered = sorted(self._numbers.items())
        for (mine, number), ((start, _), other) in pairwise(ordered):
            if start < sum(mine):
                first, second = sorted((number, other))
                raise UnsupportedError(
                    f"{self._labels[first]} and {self._labels[second]} lie in storages "
                    f"that are the same memory in part, which can be received into in "
                    f"mode 'staged' only"
                )
