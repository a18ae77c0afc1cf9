"""Memory of the host for what a trainer rank pushes, filled from the CPU or a GPU.

Its pages are all there when it is made. Where tensors are on a GPU they are pinned: the
GPU then copies by itself, at the full speed of its bus, and no kernel is launched.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync.backend import create_shm, pin
from weightsync.layout import Captured
from weightsync.merging import places_of
from weightsync.plan import slot_layout
from weightsync.remembered import Remembered
from weightsync.runtime import in_thread
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from weightsync.spec import Manifest

    Ordered = Callable[[Any], AbstractContextManager[None]]
    """Lets a thread work on the device, after a mark; all is done when it ends."""

FORM_SECONDS: Final = 10.0
"""Limit for forming a group of one."""


class Copy:
    """Memory for what a rank pushes in one layout. Close it when nobody reads it."""

    def __init__(self, captured: Captured) -> None:
        """Raise WeightSyncError where there is not enough memory. Blocks."""
        self.manifest: Final = captured.manifest
        self._offsets: Final = slot_layout(captured.manifest).offsets
        self._sizes: Final = [tensor.nbytes for tensor in captured.tensors]
        self._group: Any = create_shm(None, enable_reconfigure=True)
        try:
            memory = self._allocate(captured)
        except BaseException:
            self._group.abort()
            raise
        tensors = [
            _like(memory[offset : offset + size], tensor)
            for offset, size, tensor in zip(
                self._offsets, self._sizes, captured.tensors, strict=True
            )
        ]
        self.captured: Final = Captured(captured.manifest, tuple(tensors))
        self._whole: Final = self._runs(captured.manifest, range(len(tensors)))
        self._parts: Remembered[bytes, torch.Tensor] = Remembered()

    async def take(self, captured: Captured, ordered: Ordered, after: Any) -> None:
        """Copy all of it, or, of another layout, what replaces pieces of this one.

        The values are final ``after`` a mark of the engine. Raises PlanError for pieces
        that are not in this one, or lost their memory.
        """
        runs, digest = self._whole, captured.manifest.digest
        if digest != self.manifest.digest:
            if not self._parts.use(digest):
                found = await in_thread(self._part, captured.manifest)
                self._parts.put(digest, found)
            runs = self._parts[digest]
        if not len(runs):
            return
        if self._pinned is None:
            await self._window.copy_in(captured.tensors, runs)
        else:
            tensors = captured.tensors
            await in_thread(self._take_from_gpu, tensors, runs, ordered, after)

    def close(self) -> None:
        """Let the memory go, once nobody else has it. Idempotent; blocks briefly."""
        if self._pinned is not None:
            self._pinned.close()
        self._group.abort()

    def _allocate(self, captured: Captured) -> torch.Tensor:
        _form_alone(self._group)
        nbytes = slot_layout(captured.manifest).nbytes
        memory = Window.allocate(self._group, max(nbytes, 1))
        self._window = Window(self._group, memory)
        on_gpu = any(tensor.is_cuda for tensor in captured.tensors)
        self._pinned = pin(memory) if on_gpu else None
        return memory

    def _take_from_gpu(
        self,
        tensors: Sequence[torch.Tensor],
        runs: torch.Tensor,
        ordered: Ordered,
        after: Any,
    ) -> None:
        if self._pinned is not None:
            with ordered(after):
                self._pinned.copy_in(tensors, runs)

    def _part(self, part: Manifest) -> torch.Tensor:
        return self._runs(part, places_of(self.manifest, part))

    def _runs(self, manifest: Manifest, places: list[int] | range) -> torch.Tensor:
        """What goes where; each memory once."""
        roots = manifest.roots
        rows = [
            [index, 0, self._offsets[place], 1, *[self._sizes[place]] * 3]
            for index, place in enumerate(places)
            if roots[index] == index and self._sizes[place]
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


def _form_alone(group: Any) -> None:
    options = ReconfigureOptions()
    options.uuid = 1
    options.handles = [group.get_reconfigure_handle()]
    options.timeout = timedelta(seconds=FORM_SECONDS)
    group.reconfigure(options).wait()


def _like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View bytes as the tensor whose bytes they are."""
    return memory.view(tensor.dtype).view(tensor.shape)
