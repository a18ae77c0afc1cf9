"""A generator rank's tensors: how versions get into them in each mode."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import torch

from weightsync.backend import first_unwritable
from weightsync.epoch import Mode
from weightsync.errors import PlanError, UnsupportedError
from weightsync.fit import LISTED
from weightsync.gaps import Strided, gaps
from weightsync.layout import Registered, carried
from weightsync.locate import memory_end
from weightsync.overlap import loops_of
from weightsync.plan import slot_layout
from weightsync.runtime import in_thread
from weightsync.slots import Slots, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightsync.engine import Engine
    from weightsync.memory import Memory
    from weightsync.window import Window


class Tensors:
    """The registered tensors and the window memory that belongs to them.

    In mode "staged" a slot has the pieces one after the other, in the other modes the
    storages that they are in.
    """

    def __init__(
        self,
        mode: Mode,
        registered: Registered,
        memory: Memory,
        slots: Slots,
        engine: Engine,
    ) -> None:
        self._engine: Final = engine
        self._mode: Final = mode
        self._tensors: Final = registered.tensors
        self._labels: Final = registered.labels
        self._names: Final = registered.manifest.names
        self._roots: Final = registered.manifest.roots
        self._places: Final = registered.manifest.places
        self._layout: Final = slot_layout(registered.manifest)
        self._storages: Final = registered.storages
        self._slots: Final = slots
        self._memory: Final = memory
        self._owners: Final = frozenset(
            [root for root in self._roots if self._tensors[root].nbytes]
        )
        self._covered: tuple[frozenset[str], frozenset[int]] | None = None
        self._copies: dict[frozenset[int], tuple[Tensor, list[int]]] = {}
        self._others: dict[frozenset[int], Tensor] = {}

    def move_in(self) -> None:
        """Let the storages live in the window, with their values (swap, inplace)."""
        if self._mode is Mode.STAGED:
            return
        pairs = zip(self._storages, self._layout.storages, strict=True)
        with self._engine.ordered(self._engine.noted()):
            for (storage, *_), start in pairs:
                begin = self._slots.data(0) + start
                self._memory.view(begin, storage.nbytes).copy_(storage)
        self._repoint(0)

    async def switch(self, window: Window, slot: int, names: frozenset[str]) -> None:
        """Make what has arrived in a slot the value of the tensors.

        Raises PlanError for a tensor that has become read-only, before any is changed.
        """
        if self._mode is Mode.STAGED:
            self._check_writable()
            await self._copy_out(window, names)
        elif self._mode is Mode.SWAP:
            await self._engine.settled()
            await self._keep_others(window, slot, names)
            self._repoint(slot)

    def covered_by(self, names: frozenset[str] | None) -> frozenset[int]:
        """Return which memories a push of these names fills, as indices of pieces.

        All of them without names.
        """
        if names is None:
            return self._owners
        if self._covered is None or self._covered[0] is not names:
            pairs = zip(self._roots, self._names, strict=True)
            filled = [root for root, name in pairs if name in names]
            self._covered = names, self._owners.intersection(filled)
        return self._covered[1]

    def _check_writable(self) -> None:
        # Smaller ones share their pages with what is written all the time.
        large = [i for i in self._owners if self._tensors[i].nbytes >= mmap.PAGESIZE]
        try:
            extents = [_extent(self._tensors[i]) for i in large]
        except RuntimeError as error:  # of torch, for strides beyond the storage
            raise PlanError(f"{self._shrunk()}{error}") from error
        index = first_unwritable(extents)
        if index >= 0:
            raise _unwritable(self._labels[large[index]])

    async def _copy_out(self, window: Window, names: frozenset[str]) -> None:
        covered = self.covered_by(names)
        if covered not in self._copies:
            strided = self._strided(covered)
            runs = self._table(covered.difference(strided))
            self._copies = {covered: (runs, strided)}
        runs, strided = self._copies[covered]
        if len(runs):
            try:
                await window.copy_out(self._tensors, runs)
            except PlanError as error:
                raise PlanError(f"{self._shrunk()}{error}") from error
        pairs = [(self._tensors[i], self._view(i)) for i in strided]
        if pairs:
            await in_thread(self._copy_alone, pairs)

    def _copy_alone(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if shrunk := self._shrunk():  # torch would write beyond it, or fail namelessly
            raise PlanError(f"{shrunk}no version can be copied there")
        with self._engine.ordered(self._engine.noted()):
            _copy(pairs)

    def _shrunk(self) -> str:
        """Say which tensors have lost memory since they were registered."""
        labels = [
            label
            for label, tensor in zip(self._labels, self._tensors, strict=True)
            if tensor.untyped_storage().nbytes() < memory_end(tensor)
        ]
        if not labels:
            return ""
        return f"{', '.join(labels)}: storage freed since it was registered; "

    async def _keep_others(
        self, window: Window, slot: int, names: frozenset[str]
    ) -> None:
        """What a push did not bring keeps its value in the new slot.

        That is pieces of other names, and bytes of storages that no piece fills.
        """
        covered = self.covered_by(names)
        if covered not in self._others:
            self._others = {covered: await in_thread(self._beside, covered)}
        runs = self._others[covered].clone()
        if runs.numel():
            runs[:, 1] += self._slots.data(1 - slot)
            runs[:, 2] += self._slots.data(slot)
            sources = self._memory.segments.sources(runs)
            await self._engine.copy_in(window, self._memory.tensors, sources)

    def _beside(self, covered: frozenset[int]) -> Tensor:
        """Make a table of all bytes of a slot that are not in these pieces."""
        pieces: list[list[Strided]] = [[] for _ in self._storages]
        for index in covered:
            place, tensor = self._places[index], self._tensors[index]
            pieces[place.storage].append(Strided(place.offset, *loops_of(tensor)))
        rows: list[tuple[int, ...]] = []
        storages = zip(pieces, self._storages, self._layout.storages, strict=True)
        for filled, (storage, *_), base in storages:
            for start, times, size, stride in gaps(0, storage.nbytes, filled):
                at = base + start
                rows.append((0, at, at, times, size, stride, stride))
        return table(rows, 0)

    def _strided(self, owners: frozenset[int]) -> list[int]:
        alone = self._engine.copies_alone
        return [i for i in sorted(owners) if alone(self._tensors[i])]

    def _table(self, owners: frozenset[int]) -> Tensor:
        rows = [(i, self._layout.offsets[i], self._tensors[i].nbytes) for i in owners]
        runs = [(i, 0, at, 1, size, size, size) for i, at, size in sorted(rows)]
        return table(runs, self._slots.data(0))

    def _view(self, index: int) -> Tensor:
        """A piece where it lies packed in the slot (staged)."""
        tensor = self._tensors[index]
        start = self._slots.data(0) + self._layout.offsets[index]
        data = self._memory.view(start, tensor.nbytes)
        return data.view(tensor.dtype).view(tensor.shape)

    def _repoint(self, slot: int) -> None:
        base = self._slots.data(slot)
        pairs = [
            (storage, base + start)
            for same, start in zip(self._storages, self._layout.storages, strict=True)
            for storage in same
        ]
        self._memory.lodge(pairs)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first of each pair, exactly."""
    # Inference mode may write inference tensors, leaves and plain tensors alike.
    with torch.inference_mode():
        for target, source in pairs:
            carried(target.detach()).copy_(carried(source))


def check_mode(mode: Mode, registered: Registered) -> None:
    """Refuse storages that cost a mode much more than is received into them.

    A small view of a large storage would need a window as large as that storage.
    """
    if mode is Mode.STAGED:
        return
    manifest = registered.manifest
    filled = [0] * len(registered.storages)
    for index, tensor in enumerate(registered.tensors):
        if manifest.roots[index] == index and tensor.nbytes:
            filled[manifest.places[index].storage] += tensor.nbytes
    for number, (nbytes, size) in enumerate(
        zip(filled, manifest.storages, strict=True)
    ):
        if 2 * nbytes < size:
            raise UnsupportedError(
                f"{_labels_in(registered, number)}: mode {mode.value!r} exchanges "
                f"whole storages, but what is pushed fills only {nbytes} of the {size} "
                f"bytes of this one, less than half; use mode 'staged' for it"
            )


def _labels_in(registered: Registered, storage: int) -> str:
    places = registered.manifest.places
    pairs = zip(registered.labels, places, registered.tensors, strict=True)
    labels = [
        label
        for label, place, tensor in pairs
        if place.storage == storage and tensor.nbytes
    ]
    rest = len(labels) - LISTED
    return ", ".join(labels[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_writable(registered: Registered) -> None:
    """Refuse tensors in memory that cannot be written, naming the first."""
    index = first_unwritable([_extent(tensor) for tensor in registered.tensors])
    if index >= 0:
        raise _unwritable(registered.labels[index])


def _extent(tensor: Tensor) -> Tensor:
    """View everything from the first to the last element of a tensor."""
    if tensor.is_contiguous():
        return tensor
    begin = int(tensor.storage_offset())
    size = memory_end(tensor) // tensor.itemsize - begin
    return tensor.detach().as_strided((size,), (1,))


def _unwritable(label: str) -> PlanError:
    return PlanError(f"{label}: its memory cannot be written (read-only pages)")
