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
    from weightsync.generator import GeneratorRank
    from weightsync.session import GeneratorSession

_held: Final[ContextVar[tuple[int, ...]]] = ContextVar("_held", default=())
"""The generators (by id) of which this task, or the one that started it, has a lease.

Such a task must not let a switch go first, which waits for the lease that it has.
"""


class Weights(NamedTuple):
    """What a read lease shows: a version, and the registered tensors by name."""

    version: int | None
    tensors: dict[str, Tensor]


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
        self._rank: GeneratorRank | None = None

    def __enter__(self) -> Weights:
        """Take the lease."""
        rank = self._core.session.rank
        return self._acquire(rank, polite=not _held_here(rank) and not _in_event_loop())

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        rank, self._rank = self._rank, None
        if rank is None:
            return
        others = list(_held.get())
        if id(rank) in others:
            others.remove(id(rank))
            _held.set(tuple(others))
        if rank.release() and self._core.open:
            self._core.runtime.post(_call, rank.notify)

    async def __aenter__(self) -> Weights:
        """Take the lease; wait for a switch that is wanted or under way."""
        rank = self._core.session.rank
        if rank.lease_waits and not _held_here(rank):
            await self._core.runtime.acall(rank.wait_for_switch)
        return self._acquire(rank, polite=False)

    async def __aexit__(self, *_: object) -> None:
        """Give it back."""
        self.__exit__()

    def _acquire(self, rank: GeneratorRank, *, polite: bool) -> Weights:
        if self._rank is not None:
            raise ClosedError("a lease can be entered once at a time")
        version = rank.acquire(polite=polite)
        self._rank = rank
        _held.set((*_held.get(), id(rank)))
        return Weights(version, self._tensors)


def _held_here(rank: GeneratorRank) -> bool:
    return id(rank) in _held.get()


async def _call(function: Callable[[], Any]) -> None:
    function()


def _in_event_loop() -> bool:
    try:
        current_token()
    except RuntimeError:
        return False
    return True
