"""Where things lie in a generator rank's window: headers first, then the slots.

The layout depends on the mode and the manifest only, so both ends compute it alike.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from weightsync.errors import ProtocolError
from weightsync.messages import MAX_RANKS
from weightsync.plan import slot_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from weightsync.epoch import Mode
    from weightsync.runs import Run
    from weightsync.spec import Manifest

HEADER_BYTES: Final = 64
HEADER_AREA: Final = HEADER_BYTES * MAX_RANKS
"""One header for each trainer rank that there can be: 256 KiB a slot."""

_MAGIC: Final = b"WSHEAD01"
_HEADER: Final = struct.Struct("<8sqqqq16s8x")


@dataclass(frozen=True, slots=True)
class Header:
    """What a trainer rank puts last: which version, and what it put before."""

    version: int
    sequence: int
    rows: int
    nbytes: int
    plan: bytes

    def pack(self) -> Tensor:
        """Encode as uint8 of shape (HEADER_BYTES,)."""
        data = _HEADER.pack(
            _MAGIC, self.version, self.sequence, self.rows, self.nbytes, self.plan
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: Tensor) -> Header:
        """Decode; ProtocolError for what is no header."""
        magic, *fields = _HEADER.unpack(bytes(data.tolist()))
        if magic != _MAGIC:
            raise ProtocolError(f"a header begins with {magic!r}, not {_MAGIC!r}")
        return cls(*fields)


@dataclass(frozen=True, slots=True)
class Slots:
    """The window of one generator rank; offsets and sizes in bytes."""

    count: int
    slot_nbytes: int

    @classmethod
    def of(cls, mode: Mode, manifest: Manifest) -> Slots:
        """Lay out the window for a mode and what the rank registered."""
        return cls(mode.slots, slot_layout(manifest).nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the window."""
        return self.data(self.count)

    def header(self, slot: int, trainer: int) -> int:
        """Where the header of a trainer rank begins."""
        return slot * HEADER_AREA + trainer * HEADER_BYTES

    def data(self, slot: int) -> int:
        """Where the tensors of a slot begin."""
        return self.count * HEADER_AREA + slot * self.slot_nbytes


def table(runs: Sequence[Run] | Iterable[Sequence[int]], base: int) -> Tensor:
    """Turn runs into a table for ``Window``, their targets moved by ``base`` bytes."""
    rows = [[run[0], run[1], run[2] + base, *run[3:]] for run in runs]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
