"""Where things lie in a generator rank's window: headers first, then the slots.

The layout depends on the mode, the manifest and the size of segments only, so both ends
compute it alike.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from weightsync.errors import ProtocolError
from weightsync.messages import MAX_RANKS
from weightsync.plan import ALIGNMENT, slot_layout
from weightsync.segments import Segments, cuts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from weightsync.epoch import Mode
    from weightsync.plan import SlotLayout
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


SMALL_BYTES: Final = 64 << 20
"""A window that is no larger is not cut: so much staging memory there is anyway."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The window of one generator rank; offsets and sizes in bytes.

    ``cuts`` are where the parts of a slot begin, each of which is a segment; without
    them the whole window is one.
    """

    count: int
    slot_nbytes: int
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, mode: Mode, manifest: Manifest, segment: int = 0) -> Slots:
        """Lay out the window for a mode and what the rank registered.

        Segments have at most ``segment`` bytes, or one tensor; 0 is without a bound.
        The headers of a window that is cut are one of their own.
        """
        layout = slot_layout(manifest)
        whole = cls(mode.slots, layout.nbytes)
        small = whole.nbytes <= min(segment, SMALL_BYTES)
        if not segment or not layout.nbytes or small:
            return whole
        limit = segment // ALIGNMENT * ALIGNMENT
        return cls(mode.slots, layout.nbytes, cuts(_items(manifest, layout), limit))

    @property
    def nbytes(self) -> int:
        """Size of the window."""
        return self.data(self.count)

    @property
    def segments(self) -> Segments:
        """The segments of the window: the headers, then those of each slot."""
        slots = range(self.count) if self.cuts else ()
        starts = [self.data(slot) + cut for slot in slots for cut in self.cuts]
        return Segments((0, *starts), self.nbytes)

    def header(self, slot: int, trainer: int) -> int:
        """Where the header of a trainer rank begins."""
        return slot * HEADER_AREA + trainer * HEADER_BYTES

    def data(self, slot: int) -> int:
        """Where the tensors of a slot begin."""
        return self.count * HEADER_AREA + slot * self.slot_nbytes


def _items(manifest: Manifest, layout: SlotLayout) -> list[tuple[int, int]]:
    """What is not cut: storages where the slot mirrors them, else pieces."""
    starts, sizes = layout.storages, manifest.storages
    if not manifest.places:
        nbytes = [kind.nbytes for kind in manifest.kinds]
        starts = layout.offsets
        sizes = tuple([nbytes[kind] for kind in manifest.kind_of])
    items = zip(starts, sizes, strict=True)
    return sorted({(start, size) for start, size in items if size})


def table(runs: Sequence[Run] | Iterable[Sequence[int]], base: int) -> Tensor:
    """Turn runs into a table for ``Window``, their targets moved by ``base`` bytes."""
    rows = [[run[0], run[1], run[2] + base, *run[3:]] for run in runs]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
