"""The copy that a trainer rank keeps of what it pushed last, to be replayed.

It is memory of the host, also of what is on a GPU, whose memory trainers have least of.
It is made once for each layout and used again. Replays read it like a push reads the
caller's tensors, and it is overwritten only when none does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from weightsync.copies import Copy
from weightsync.errors import PlanError, WeightSyncError
from weightsync.messages import Fault
from weightsync.pushing import Push
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from weightsync.copies import Ordered
    from weightsync.elastic import Keep
    from weightsync.layout import Captured

STOP_SECONDS: Final = 5.0
"""How long a replay may take to stop whose link was aborted."""


class Keeper:
    """What a trainer rank keeps. ``enabled`` says whether it ever keeps anything.

    ``ordered`` lets a thread work on the device of the engine, after a mark.
    """

    def __init__(self, *, enabled: bool, ordered: Ordered) -> None:
        self.enabled: Final = enabled
        self.push: Push | None = None
        self._ordered: Final = ordered
        self._copy: Copy | None = None
        self._spare: Copy | None = None

    async def prepare(self, captured: Captured | Fault, *, partial: bool) -> None:
        """Have memory for a copy; PlanError where there is not enough.

        The copy before stays until the push has succeeded, so for that time a new
        layout takes memory of its own.
        """
        if not self.enabled or partial or isinstance(captured, Fault):
            return
        digest = captured.manifest.digest
        for copy in (self._copy, self._spare):
            if copy is not None and copy.manifest.digest == digest:
                return
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
        captured = push.captured
        if keep == "no" or isinstance(captured, Fault):
            return False
        await self._give_up()
        if keep == "all":
            self._choose(captured.manifest.digest)
        if self._copy is None:
            return False
        try:
            await self._copy.take(captured, self._ordered, push.after)
        except (WeightSyncError, RuntimeError):
            return False  # such as a storage that was freed meanwhile
        self.push = Push(push.number, self._copy.captured)
        return True

    async def close(self) -> None:
        """Let all memory go, when all links are aborted. Idempotent."""
        with anyio.move_on_after(STOP_SECONDS):
            await self._give_up()
        self.push = None
        copies, self._copy, self._spare = (self._copy, self._spare), None, None
        for copy in copies:
            if copy is not None:
                await in_thread(copy.close)

    async def _give_up(self) -> None:
        """Keep nothing any more, and return when nothing reads it."""
        before, self.push = self.push, None
        if before is not None:
            await before.stop_reading()

    def _choose(self, digest: bytes) -> None:
        """Use the spare memory where it is that of this layout."""
        if self._spare is not None and self._spare.manifest.digest == digest:
            if self._copy is not None:
                self._copy.close()
            self._copy, self._spare = self._spare, None
