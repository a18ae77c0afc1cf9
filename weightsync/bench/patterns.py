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
        if torch.equal(piece, expected):
            continue
        found, wanted = piece.view(torch.uint8), expected.view(torch.uint8)
        wrong = found.ne(wanted).nonzero().flatten()
        first = int(wrong[0])
        message = (
            f"{what}: byte {number * TILE_BYTES + first} is {int(found[first])}, "
            f"expected {int(wanted[first])}; {len(wrong)} bytes of this "
            f"{len(found)}-byte piece differ"
        )
        raise VerificationError(message)


def _pieces(tensor: Tensor) -> list[Tensor]:
    data = tensor.detach().view(-1).view(torch.uint8)
    aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
    words = data.view(torch.int64) if aligned and data.numel() % 8 == 0 else data
    return list(torch.split(words, TILE_BYTES // words.element_size()))


def _expected(piece: Tensor, number: int, key: tuple[int, ...]) -> Tensor:
    words = -(-piece.nbytes // 8)
    pattern = _tile()[:words] + _salt(number, *key)
    return pattern.view(torch.uint8)[: piece.nbytes].view(piece.dtype)


@cache
def _tile() -> Tensor:
    return torch.arange(1, TILE_BYTES // 8 + 1) * _STEP


def _salt(*key: int) -> int:
    data = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
