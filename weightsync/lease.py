"""Read leases: while one is held, no version is switched in."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from anyio.lowlevel import current_token

from weightsync.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from weightsync.core import Core
    from weightsync.reading import Reading
    from weightsync.rejoining import GeneratorSession

_held: Final[ContextVar[tuple[int, ...]]] = ContextVar("_held", default=())
"""The generators (by id) of which this task, or the one that started it, has a lease.

Such a task must not let a switch go first, which waits for the lease that it has.
"""


class Weights(NamedTuple):
    """What a read lease shows: a version, and the registered tensors by name.

    ``epoch`` is that in which the version is counted; see ``Trainer``.
    """

    version: int | None
    tensors: dict[str, Tensor]
    epoch: int = 0


class Lease:
    """A read lease: use it with ``with`` or ``async with``, once at a time.

    While it lasts no version is switched in, and a version that waits for that goes
    before new leases. ``async with`` waits for a switch without blocking the loop;
    ``with`` blocks, in an event loop only while a switch is under way.

    Raises EpochError where the weights cannot be read (mode ``inplace`` while a version
    arrives).
    """

    def __init__(
        self, core: Core[GeneratorSession], tensors: dict[str, Tensor]
    ) -> None:
        self._core = core
        self._tensors = tensors
        self._reading: Reading | None = None

    def __enter__(self) -> Weights:
        """Take the lease."""
        reading = self._core.session.reading
        return self._acquire(
            reading, polite=not _held_here(reading) and not _in_event_loop()
        )

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        others = list(_held.get())
        if id(reading) in others:
            others.remove(id(reading))
            _held.set(tuple(others))
        if reading.release() and self._core.open:
            self._core.runtime.post(_call, reading.notify)

    async def __aenter__(self) -> Weights:
        """Take the lease; wait for a switch that is wanted or under way."""
        reading = self._core.session.reading
        if reading.lease_waits and not _held_here(reading):
            await self._core.runtime.acall(reading.wait_for_switch)
        return self._acquire(reading, polite=False)

    async def __aexit__(self, *_: object) -> None:
        """Give it back."""
        self.__exit__()

    def _acquire(self, reading: Reading, *, polite: bool) -> Weights:
        if self._reading is not None:
            raise ClosedError("a lease can be entered once at a time")
        version, epoch = reading.acquire(polite=polite)
        self._reading = reading
        _held.set((*_held.get(), id(reading)))
        return Weights(version, self._tensors, epoch)


def _held_here(reading: Reading) -> bool:
    return id(reading) in _held.get()


async def _call(function: Callable[[], Any]) -> None:
    function()


def _in_event_loop() -> bool:
    try:
        current_token()
    except RuntimeError:
        return False
    return True
