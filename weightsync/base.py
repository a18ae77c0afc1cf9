"""What all transports have in common, and opening and closing of asynchronous ones."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Generic

import anyio

from weightsync.core import Core, SessionT
from weightsync.runtime import in_thread
from weightsync.session import check_timeout

if TYPE_CHECKING:
    from typing import Self


class Face(Generic[SessionT]):
    """A core as users see it; calls without a timeout of their own take ``timeout``."""

    def __init__(self, core: Core[SessionT], timeout: float) -> None:
        self._core = core
        self._timeout = timeout

    def __repr__(self) -> str:
        """Show who and in which state."""
        return repr(self._core)

    def __del__(self) -> None:
        """Warn about a transport that was dropped while open."""
        core = getattr(self, "_core", None)
        if core is not None and core.open:
            warnings.warn(
                f"unclosed {core!r}", ResourceWarning, stacklevel=2, source=self
            )

    @property
    def address(self) -> str:
        """The address of the store, with the port that was picked for port 0."""
        return str(self._core.session.address)

    def _seconds(self, timeout: float | None) -> float:
        return check_timeout(self._timeout if timeout is None else timeout)


class Transport(Face[SessionT]):
    """The asynchronous face: an async context manager over a core."""

    async def __aenter__(self) -> Self:
        """Open; see the class."""
        runtime, session = self._core.begin()
        try:
            await runtime.acall(session.open)
        except BaseException:
            # Also what had just succeeded when it was cancelled.
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the job and end everything that was started. Idempotent.

        Takes at most a few seconds, also where peers are dead or stuck.
        """
        runtime, session = self._core.end(), self._core.last_session
        if runtime is None or session is None:
            return
        try:
            await runtime.acall(session.close)
        finally:
            await in_thread(runtime.close)

    @property
    def rank(self) -> int:
        """This rank among the trainer ranks, or those of the replica."""
        return self._core.session.place.rank

    @property
    def world_size(self) -> int:
        """Number of trainer ranks, or ranks of the replica."""
        return self._core.session.place.world_size
