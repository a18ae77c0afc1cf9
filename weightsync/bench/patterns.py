"""Bytes that differ in each place and repetition, made and checked at memory speed."""

from __future__ import annotations

import struct
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import torch

from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

TILE_BYTES: Final = 512 << 10
"""The pattern is made in pieces of this size, which stay in the cache of a core."""

_STEP: Final = 0x1E3779B97F4A7C15


class VerificationError(WeightSyncError):
    """Bytes arrived that nobody sent, or did not arrive."""


def fill(tensor: Tensor, *key: int) -> None:
    """Write the pattern that belongs to ``key`` into a contiguous tensor."""
    for number, piece in enumerate(_pieces(tensor)):
        piece.copy_(_expected(piece, number, key))


def verify(tensor: Tensor, *key: int, what: str) -> None:
    """Compare every byte; VerificationError names ``what`` and the first wrong byte."""
    for number, piece in enumerate(_pieces(tensor)):
        expected = _expected(piece, number, key)
        compare(piece, expected, what=what, begin=number * TILE_BYTES)


def compare(tensor: Tensor, expected: Tensor, *, what: str, begin: int = 0) -> None:
    """Compare the bytes of contiguous tensors, of which ``begin`` came before.

    Raises VerificationError as ``verify`` does.
    """
    words, wanted_words = _words(tensor), _words(expected)
    if words.dtype == wanted_words.dtype and torch.equal(words, wanted_words):
        return
    found, wanted = _bytes(tensor), _bytes(expected)
    if torch.equal(found, wanted):
        return
    wrong = found.ne(wanted).nonzero().flatten()
    first = int(wrong[0])
    message = (
        f"{what}: byte {begin + first} is {int(found[first])}, "
        f"expected {int(wanted[first])}; {len(wrong)} bytes of this "
        f"{len(found)}-byte piece differ"
    )
    raise VerificationError(message)


def _pieces(tensor: Tensor) -> list[Tensor]:
    words = _words(tensor)
    return list(torch.split(words, TILE_BYTES // words.element_size()))


def _words(tensor: Tensor) -> Tensor:
    """The same memory as int64, or as uint8 where that cannot be."""
    data = _bytes(tensor)
    aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if aligned and data.numel() % 8 == 0 else data


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def pattern(nbytes: int, *key: int) -> Tensor:
    """Make that of a key: uint8 of shape (nbytes,), at most ``TILE_BYTES``."""
    return (_tile()[: -(-nbytes // 8)] + _salt(*key)).view(torch.uint8)[:nbytes]


def _expected(piece: Tensor, number: int, key: tuple[int, ...]) -> Tensor:
    return pattern(piece.nbytes, number, *key).view(piece.dtype)


@cache
def _tile() -> Tensor:
    return torch.arange(1, TILE_BYTES // 8 + 1) * _STEP


def _salt(*key: int) -> int:
    data = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
