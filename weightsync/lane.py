"""Lane: a stream of a GPU in one task's hands; what it does is awaited, not waited for.

A call that gives the stream something to do runs in a thread, because CUDA and NCCL may
block the host in it. That thread ends with the call: when the stream is through, a host
function of CUDA writes to a descriptor that the loop listens to.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import torch

from weightsync import _C
from weightsync.errors import WeightSyncError
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import TypeVar

    ResultT = TypeVar("ResultT")

_LOOK_SECONDS: Final = 1.0
"""How often a stream is asked itself: one that has failed rings no bell."""


class Lane:
    """A stream, from any task of any loop, but of one at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream: Final = stream

    def follow(self, after: Iterable[torch.cuda.Event | WeightSyncError]) -> None:
        """Let what comes now begin after these events.

        Raises WeightSyncError where that fails, and what is there for an event.
        """
        for event in after:
            if isinstance(event, WeightSyncError):
                raise event
            with translated():
                self.stream.wait_event(event)

    async def run(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Call it in a thread that uses this stream. Does not wait for the stream.

        Raises what it raises, errors of torch and CUDA as WeightSyncError.
        """
        return await in_thread(self._on_stream, function, args)

    async def idle(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the stream has done what it was given; not to be cancelled.

        Raises WeightSyncError where the device has failed, and what ``check`` raises,
        which is called again and again.
        """
        bell = _C.Bell()
        try:
            with anyio.CancelScope(shield=True):
                try:
                    await self.run(self._ring, bell)
                except WeightSyncError:  # whoever lent it memory counts on the end
                    await self.run(self.stream.synchronize)
                    raise
                await self._rung(bell, check)
        finally:
            bell.close()

    def _ring(self, bell: _C.Bell) -> None:
        bell.ring_after(self.stream.stream_id, self.stream.device_index)

    async def _rung(self, bell: _C.Bell, check: Callable[[], None]) -> None:
        while True:
            with anyio.move_on_after(_LOOK_SECONDS):
                await anyio.wait_readable(bell.fileno())
                return
            check()
            if await self.run(self.stream.query):
                return

    def _on_stream(
        self, function: Callable[..., ResultT], args: tuple[object, ...]
    ) -> ResultT:
        with (
            translated(),
            torch.cuda.device(self.stream.device),
            torch.cuda.stream(self.stream),
        ):
            return function(*args)


@contextmanager
def translated() -> Generator[None]:
    """Raise errors of torch, CUDA and NCCL as WeightSyncError."""
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, ValueError) as error:
        raise as_ours(error) from error


def as_ours(error: Exception) -> WeightSyncError:
    """Return an error of torch, CUDA or NCCL as one of weightsync."""
    if isinstance(error, WeightSyncError):
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}")


def new_stream() -> Any:
    """Return one of torch's streams of the current device."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call] # of torch
