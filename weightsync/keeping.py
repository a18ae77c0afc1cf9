"""The copy that a trainer rank keeps of what it pushed last, to be replayed.

It is memory of the host, made once for each layout and used again. Replays read it like
a push reads the caller's tensors, and it is overwritten only when none does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import anyio
import torch
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync.backend import create_shm
from weightsync.errors import PlanError, UnsupportedError, WeightSyncError
from weightsync.layout import Captured
from weightsync.merging import places_of
from weightsync.messages import Fault
from weightsync.plan import slot_layout
from weightsync.pushing import Push
from weightsync.remembered import Remembered
from weightsync.runtime import in_thread
from weightsync.window import Window

if TYPE_CHECKING:
    from typing import Any

    from weightsync.elastic import Keep
    from weightsync.spec import Manifest

FORM_SECONDS: Final = 10.0
"""Limit for forming a group of one."""


class Copy:
    """Memory for what a rank pushes in one layout. Close it."""

    def __init__(self, captured: Captured) -> None:
        """Raise WeightSyncError where there is not enough memory. Blocks."""
        self.manifest: Final = captured.manifest
        self._offsets: Final = slot_layout(captured.manifest).offsets
        self._sizes: Final = [tensor.nbytes for tensor in captured.tensors]
        self._group: Any = create_shm(None, enable_reconfigure=True)
        try:
            _form_alone(self._group)
            nbytes = slot_layout(captured.manifest).nbytes
            memory = Window.allocate(self._group, max(nbytes, 1))
            self._window = Window(self._group, memory)
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

    async def take(self, captured: Captured) -> None:
        """Copy all of it, or, of another layout, what replaces pieces of this one.

        Raises PlanError for pieces that are not in this one, or lost their memory.
        """
        runs, digest = self._whole, captured.manifest.digest
        if digest != self.manifest.digest:
            if not self._parts.use(digest):
                found = await in_thread(self._part, captured.manifest)
                self._parts.put(digest, found)
            runs = self._parts[digest]
        if len(runs):
            await self._window.copy_in(captured.tensors, runs)

    def close(self) -> None:
        """Let the memory go, once nobody else has it. Idempotent; blocks briefly."""
        self._group.abort()

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


class Keeper:
    """What a trainer rank keeps. ``enabled`` says whether it ever keeps anything."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled: Final = enabled
        self.push: Push | None = None
        self._copy: Copy | None = None
        self._spare: Copy | None = None

    async def prepare(self, captured: Captured | Fault, *, partial: bool) -> None:
        """Have memory for a copy; PlanError where there is not enough.

        UnsupportedError for tensors that are not in memory of the host.
        The copy before stays until the push has succeeded, so for that time a new
        layout takes memory of its own.
        """
        if not self.enabled or partial or isinstance(captured, Fault):
            return
        digest = captured.manifest.digest
        for copy in (self._copy, self._spare):
            if copy is not None and copy.manifest.digest == digest:
                return
        devices = {tensor.device.type for tensor in captured.tensors} - {"cpu"}
        if devices:
            message = f"replay=True keeps tensors on the CPU, not on {devices.pop()}"
            raise UnsupportedError(message)
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        try:
            with anyio.CancelScope(shield=True):  # what was made must be known here
                self._spare = await in_thread(Copy, captured)
        except (WeightSyncError, RuntimeError) as error:
            nbytes = sum(tensor.nbytes for tensor in captured.tensors)
            message = f"cannot keep a copy of {nbytes} bytes for replays: {error}"
            raise PlanError(message) from error

    async def keep(self, push: Push, keep: Keep) -> bool:
        """Keep what was pushed; False if nothing is kept now. No replay may read."""
        captured, before = push.captured, self.push
        if keep == "no" or isinstance(captured, Fault):
            return False
        self.push = None
        if before is not None:
            await before.stop_reading()
        if keep == "all":
            self._choose(captured.manifest.digest)
        if self._copy is None:
            return False
        try:
            await self._copy.take(captured)
        except WeightSyncError:
            return False  # such as a storage that was freed meanwhile
        self.push = Push(push.number, self._copy.captured)
        return True

    def close(self) -> None:
        """Let all memory go. Idempotent."""
        self.push = None
        for copy in (self._copy, self._spare):
            if copy is not None:
                copy.close()
        self._copy = self._spare = None

    def _choose(self, digest: bytes) -> None:
        """Use the spare memory where it is that of this layout."""
        if self._spare is not None and self._spare.manifest.digest == digest:
            if self._copy is not None:
                self._copy.close()
            self._copy, self._spare = self._spare, None


def _form_alone(group: Any) -> None:
    options = ReconfigureOptions()
    options.uuid = 1
    options.handles = [group.get_reconfigure_handle()]
    options.timeout = timedelta(seconds=FORM_SECONDS)
    group.reconfigure(options).wait()


def _like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View bytes as the tensor whose bytes they are."""
    return memory.view(tensor.dtype).view(tensor.shape)
