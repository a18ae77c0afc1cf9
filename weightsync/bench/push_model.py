"""The state dicts that the case ``push`` moves: who holds what of them, and the bytes.

Each tensor is a matrix. Trainer ranks may cut its rows, generator ranks its columns; a
cell is what a trainer rank and a generator rank have in common.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch

from weightsync.bench.memory import resident_tensor
from weightsync.bench.patterns import TILE_BYTES, compare, pattern
from weightsync.layout import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

ROW_BYTES: Final = 1 << 10
MOST_ROW_BYTES: Final = TILE_BYTES // 2
"""Converted rows are made of twice as many bytes, and tiles have whole rows."""
SMALL_BYTES: Final = 8 << 10

DTYPE: Final = torch.bfloat16
MASTER: Final = torch.float32
"""What a push converts from."""

# The exponents of a float32 with these bits are from 2**-63 to 1: it is finite and
# normal, and so is what it is converted to.
_KEPT: Final = ~(1 << 30)
_SET: Final = 1 << 29


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes of each of its bfloat16 tensors, and of a row of any of them."""

    case: Literal["model", "small", "one"]
    sizes: tuple[int, ...]
    row_bytes: int = ROW_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of all tensors."""
        columns = self.row_bytes // DTYPE.itemsize
        return [(size // self.row_bytes, columns) for size in self.sizes]

    @classmethod
    def like_a_transformer(
        cls, total: int, tensors: int, row_bytes: int = ROW_BYTES
    ) -> Model:
        """Build one of about ``total`` bytes: embeddings, matrices, many small ones.

        Two embeddings have an eighth of the bytes each, two tensors of five have 8 KiB,
        as norms and biases do, and the others share the rest. All have whole rows.
        """
        small = 2 * tensors // 5
        embeddings = min(2, tensors - small)
        matrices = tensors - small - embeddings
        large = total - small * SMALL_BYTES
        embedding = large // (8 if matrices else max(embeddings, 1))
        sizes = [embedding] * embeddings + [SMALL_BYTES] * small
        if matrices:
            sizes += [(large - embeddings * embedding) // matrices] * matrices
        whole = [max(size // row_bytes, 1) * row_bytes for size in sizes]
        return cls("model", tuple(whole), row_bytes)

    @classmethod
    def many_small(cls, tensors: int, nbytes: int) -> Model:
        """``tensors`` of one row of ``nbytes`` each."""
        return cls("small", (nbytes,) * tensors, nbytes)

    @classmethod
    def one_large(cls, rows: int, row_bytes: int) -> Model:
        """Build one tensor."""
        return cls("one", (rows * row_bytes,), row_bytes)


@dataclass(frozen=True, slots=True)
class Cut:
    """How many trainer ranks cut the rows, and how many generator ranks the columns."""

    rows: int = 1
    columns: int = 1


class Held:
    """What one rank has of each tensor, resident: all, a part of the rows or columns.

    ``row`` and ``column`` say which part of the cut; None is all. ``entries`` are on
    ``device``, if there is one; values are made and compared on the CPU.
    """

    def __init__(
        self,
        model: Model,
        cut: Cut,
        dtype: torch.dtype,
        *,
        row: int | None = None,
        column: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._cut: Final = cut
        self._dtype: Final = dtype
        self._row: Final = row
        self._column: Final = column
        self._device: Final = device
        self._tensors: Final[dict[str, Tensor]] = {}
        self._copies: Final[list[Tensor]] = []
        self.entries: Final[dict[str, Tensor | Shard]] = {}
        for index, shape in enumerate(model.shapes):
            self._hold(f"layers.{index}.weight", shape)

    def fill(self, version: int) -> None:
        """Write the bytes of a version."""
        for key, _, tile in self._tiles(self._tensors, self._dtype):
            tile.copy_(_values(tile, self._dtype, version, *key))
        for copy, tensor in zip(self._copies, self._tensors.values(), strict=False):
            copy.copy_(tensor)

    def verify(
        self, tensors: Mapping[str, Tensor], version: int, dtype: torch.dtype
    ) -> int:
        """Compare every byte with what was pushed as ``dtype``; return how many.

        Raises VerificationError.
        """
        verified = 0
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        for key, name, tile in self._tiles(tensors, dtype):
            expected = _values(tile, dtype, version, *key).to(tile.dtype)
            what = f"version {version} of {name!r}, cell {key[1:3]}, tile {key[3]}"
            compare(tile, expected, what=what)
            verified += tile.nbytes
        return verified

    def _hold(self, name: str, shape: tuple[int, int]) -> None:
        """Cut as torch cuts, so that the last parts may be smaller or empty."""
        top, rows = _part(shape[0], self._row, self._cut.rows)
        left, columns = _part(shape[1], self._column, self._cut.columns)
        memory = resident_tensor(rows * columns * self._dtype.itemsize)
        tensor = self._tensors[name] = memory.view(self._dtype).view(rows, columns)
        whole = (rows, columns) == shape
        if self._device is not None:
            tensor = tensor.to(self._device)
            self._copies.append(tensor)
        self.entries[name] = (
            tensor if whole else Shard(tensor, global_shape=shape, offsets=(top, left))
        )

    def _tiles(
        self, tensors: Mapping[str, Tensor], pushed: torch.dtype
    ) -> Iterator[tuple[tuple[int, int, int, int], str, Tensor]]:
        """Whole rows of each cell that stay in the cache of a core, and their keys."""
        for index, (name, tensor) in enumerate(tensors.items()):
            for row, column, cell in self._cells(tensor):
                rows = max(TILE_BYTES // (pushed.itemsize * cell.shape[1]), 1)
                for number, tile in enumerate(torch.split(cell, rows)):
                    yield (index, row, column, number), name, tile

    def _cells(self, tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        cut = self._cut
        across = [tensor] if self._row is not None else tensor.chunk(cut.rows)
        for row, band in enumerate(across, self._row or 0):
            cells = [band] if self._column is not None else band.chunk(cut.columns, 1)
            for column, cell in enumerate(cells, self._column or 0):
                if cell.numel():
                    yield row, column, cell


class TorchCopy:
    """The same bytes, or numbers, copied by ``Tensor.copy_``, one tensor at a time.

    From ``source`` to ``target``, resident uint8 tensors: a loop that a user may write.
    """

    def __init__(
        self, model: Model, cut: Cut, dtype: torch.dtype, source: Tensor, target: Tensor
    ) -> None:
        self._pairs: Final[list[tuple[Tensor, Tensor]]] = []
        wholes: list[Tensor] = []
        for rows, columns in model.shapes:
            nbytes = rows * columns * dtype.itemsize
            wholes.append(source[:nbytes].view(dtype).view(rows, columns))
            source = source[nbytes:]
        for part in range(cut.columns):
            for whole in wholes:
                piece = whole.chunk(cut.columns, 1)[part]
                nbytes = piece.numel() * DTYPE.itemsize
                self._pairs.append(
                    (target[:nbytes].view(DTYPE).view(piece.shape), piece)
                )
                target = target[nbytes:]

    def seconds(self) -> float:
        """Copy everything once; time it."""
        began = time.perf_counter()
        for target, source in self._pairs:
            target.copy_(source)
        return time.perf_counter() - began


def _part(size: int, index: int | None, count: int) -> tuple[int, int]:
    """Where a part of a dim begins, and its size; all of it where index is None."""
    if index is None:
        return 0, size
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def _values(tile: Tensor, dtype: torch.dtype, *key: int) -> Tensor:
    """The values that belong to a key, in the shape of a tile."""
    values = pattern(tile.numel() * dtype.itemsize, *key).view(dtype).view(tile.shape)
    if dtype == MASTER:
        values.view(torch.int32).bitwise_and_(_KEPT).bitwise_or_(_SET)
    return values
