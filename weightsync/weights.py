"""A generator rank's tensors: how versions get into them in each mode."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import torch

from weightsync.backend import first_unwritable, repoint
from weightsync.epoch import Mode
from weightsync.errors import PlanError, UnsupportedError
from weightsync.layout import Registered, carried
from weightsync.plan import slot_layout
from weightsync.runtime import in_thread
from weightsync.slots import Slots, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from weightsync.window import Window


class Tensors:
    """The registered tensors and the window memory that belongs to them."""

    def __init__(
        self, mode: Mode, registered: Registered, memory: Tensor, slots: Slots
    ) -> None:
        self._mode: Final = mode
        self._tensors: Final = registered.tensors
        self._specs: Final = registered.manifest.tensors
        self._offsets: Final = slot_layout(registered.manifest).offsets
        self._slots: Final = slots
        self._memory: Final = memory
        self._moved: Final = [
            i for i, s in enumerate(self._specs) if s.tied is None and s.nbytes
        ]
        self._covered: tuple[frozenset[str], frozenset[str]] | None = None
        self._views: Final = [self._view_all(slot) for slot in range(slots.count)]
        self._tables: dict[frozenset[str], tuple[Tensor, list[int]]] = {}

    def move_in(self) -> None:
        """Let the tensors live in the window, with their values (swap, inplace)."""
        if self._mode is Mode.STAGED:
            return
        with torch.inference_mode():
            for view, tensor in zip(self._views[0], self._tensors, strict=True):
                carried(view).copy_(carried(tensor.detach()))
        self._repoint(0)

    async def switch(self, window: Window, slot: int, names: frozenset[str]) -> None:
        """Make what has arrived in a slot the value of the tensors.

        Raises PlanError for a tensor that has become read-only, before any is changed.
        """
        if self._mode is Mode.STAGED:
            self._check_writable()
            await self._copy_out(window, names)
        elif self._mode is Mode.SWAP:
            await self._keep_others(window, slot, names)
            self._repoint(slot)

    def _check_writable(self) -> None:
        # Smaller ones share their pages with what is written all the time.
        large = [i for i in self._moved if self._specs[i].nbytes >= mmap.PAGESIZE]
        index = first_unwritable([self._tensors[i] for i in large])
        if index >= 0:
            raise _unwritable(self._specs[large[index]].name)

    async def _copy_out(self, window: Window, names: frozenset[str]) -> None:
        if names not in self._tables:
            self._tables = {names: self._copies(names)}
        runs, strided = self._tables[names]
        try:
            await window.copy_out(self._tensors, runs)
        except PlanError as error:
            raise PlanError(f"{self._shrunk()}{error}") from error
        if strided:
            await in_thread(self._copy_strided, strided)

    def _shrunk(self) -> str:
        """Say which tensors have lost memory since they were registered."""
        names = [
            spec.name
            for spec, tensor in zip(self._specs, self._tensors, strict=True)
            if tensor.untyped_storage().nbytes() < spec.nbytes
        ]
        return f"{names}: storage freed since it was registered; " if names else ""

    def _copies(self, names: frozenset[str]) -> tuple[Tensor, list[int]]:
        """Runs of the contiguous tensors, and the indices of the others."""
        chosen = [i for i in self._owners(names) if self._specs[i].nbytes]
        strided = [i for i in chosen if not self._tensors[i].is_contiguous()]
        packed = [i for i in chosen if self._tensors[i].is_contiguous()]
        return self._runs(packed, self._slots.data(0)), strided

    def _copy_strided(self, indices: Iterable[int]) -> None:
        # Inference mode may write inference tensors, leaves and plain tensors alike.
        with torch.inference_mode():
            for index in indices:
                tensor = self._tensors[index].detach()
                carried(tensor).copy_(carried(self._views[0][index]))

    async def _keep_others(
        self, window: Window, slot: int, names: frozenset[str]
    ) -> None:
        """What a partial push did not bring keeps its value in the new slot."""
        covered = self.covered_by(names)
        if len(covered) == len(self._specs):
            return
        others = frozenset(spec.name for spec in self._specs) - covered
        kept = [i for i in self._owners(others) if self._specs[i].nbytes]
        if kept:
            runs = self._runs(kept, self._slots.data(slot))
            await window.copy_in(self._views[1 - slot], runs)

    def _owners(self, names: frozenset[str]) -> list[int]:
        """Indices of the tensors whose memory these names cover, each memory once."""
        tied = self.covered_by(names)
        specs = enumerate(self._specs)
        return [i for i, spec in specs if spec.tied is None and spec.name in tied]

    def covered_by(self, names: frozenset[str]) -> frozenset[str]:
        """The registered ones of these names, and all that share memory with one."""
        if self._covered is None or self._covered[0] is not names:
            self._covered = names, self._cover(names)
        return self._covered[1]

    def _cover(self, names: frozenset[str]) -> frozenset[str]:
        root: dict[str, str] = {}
        for spec in self._specs:
            root[spec.name] = spec.name if spec.tied is None else root[spec.tied]
        roots = {root[name] for name in names if name in root}
        return frozenset(name for name, found in root.items() if found in roots)

    def _runs(self, indices: Iterable[int], base: int) -> Tensor:
        sizes = [(i, self._specs[i].nbytes) for i in indices]
        return table([(i, 0, self._offsets[i], 1, n, n, n) for i, n in sizes], base)

    def _view_all(self, slot: int) -> list[Tensor]:
        base = self._slots.data(slot)
        views: list[Tensor] = []
        for spec, offset, tensor in zip(
            self._specs, self._offsets, self._tensors, strict=True
        ):
            data = self._memory[base + offset : base + offset + spec.nbytes]
            views.append(data.view(tensor.dtype).view(tensor.shape))
        return views

    def _repoint(self, slot: int) -> None:
        base = self._slots.data(slot)
        repoint(
            [self._tensors[i] for i in self._moved],
            self._memory,
            [base + self._offsets[i] for i in self._moved],
        )


def check_mode(mode: Mode, registered: Registered) -> None:
    """Refuse tensors whose storage a mode could not exchange."""
    if mode is Mode.STAGED:
        return
    for spec, tensor in zip(
        registered.manifest.tensors, registered.tensors, strict=True
    ):
        whole = tensor.untyped_storage().nbytes() == spec.nbytes
        if spec.nbytes and not (whole and tensor.is_contiguous()):
            message = (
                f"{spec.name!r}: mode {mode.value!r} exchanges whole storages, but "
                f"this tensor of {spec.nbytes} bytes is part of a storage of "
                f"{tensor.untyped_storage().nbytes()} or is not contiguous; use mode "
                "'staged' for it"
            )
            raise UnsupportedError(message)


def check_writable(registered: Registered) -> None:
    """Refuse tensors in memory that cannot be written, naming the first."""
    index = first_unwritable(registered.tensors)
    if index >= 0:
        raise _unwritable(registered.manifest.names[index])


def _unwritable(name: str) -> PlanError:
    return PlanError(f"{name!r}: its memory cannot be written (read-only pages)")
