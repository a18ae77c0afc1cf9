"""What a generator rank keeps however often it joins: its tensors and versions."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import anyio

from weightsync.epoch import Mode
from weightsync.generator import Settled
from weightsync.memory import Memory
from weightsync.reading import Reading
from weightsync.runtime import in_thread
from weightsync.slots import Slots
from weightsync.weights import Tensors

if TYPE_CHECKING:
    from weightsync.counting import Held
    from weightsync.engine import Engine
    from weightsync.layout import Registered
    from weightsync.link import GeneratorLink
    from weightsync.spec import Manifest


class Member:
    """One rank of a replica, in the pool or out of it.

    ``instance`` distinguishes it from others that may come under the same name. It is
    ``replaced`` once another process has become rank 0 in its place.
    """

    def __init__(
        self, replica: str, mode: Mode, registered: Registered, engine: Engine
    ) -> None:
        self.replica: Final = replica
        self.mode: Final = mode
        self.instance: Final = secrets.token_hex(8)
        self.reading: Final = Reading(mode, engine.note)
        self.replaced = False
        self.slots: Final = Slots.of(mode, registered.manifest, engine.segment)
        self.engine: Final = engine
        self._registered: Final = registered

    @property
    def manifest(self) -> Manifest:
        """What it holds."""
        return self._registered.manifest

    @property
    def last(self) -> tuple[Held | None, bool]:
        """The last version that it has received, and whether it still holds it."""
        epochs = self.reading.epochs
        return epochs.last, epochs.version is not None

    async def settle(self, link: GeneratorLink) -> Settled:
        """Allocate a window, and let the tensors live in it where the mode wants that.

        Memory of a window is used for one link only: who could write there through a
        former one cannot reach it.
        """
        if self.mode is Mode.STAGED:
            return await in_thread(self._allocate, link)
        settled = await in_thread(self._allocate, link)
        await self.reading.unread()
        with self.reading.moving(), anyio.CancelScope(shield=True):
            await in_thread(settled.tensors.move_in)
        return settled

    def _allocate(self, link: GeneratorLink) -> Settled:
        segments = self.slots.segments
        allocate = self.engine.memory
        parts = [allocate(link.group, size) for size in segments.sizes]
        memory = Memory(parts, segments)
        tensors = Tensors(self.mode, self._registered, memory, self.slots, self.engine)
        return Settled(memory, tensors)
