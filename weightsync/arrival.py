"""A version on its way into a slot of a generator rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from weightsync.errors import ClosedError

if TYPE_CHECKING:
    from weightsync.announcing import AllPut
    from weightsync.link import GeneratorLink
    from weightsync.messages import Discard, Expect
    from weightsync.operation import Operation
    from weightsync.prepared import Prepared


class Arrival:
    """A version on its way into a slot."""

    def __init__(self, expect: Expect, slot: int, link: GeneratorLink) -> None:
        self.expect: Final = expect
        self.slot: Final = slot
        self.operation: Operation | None = None
        self.discard: Discard | None = None
        self.whole = False
        self.nbytes = 0
        self._link: Final = link
        self._given_up = False
        self._announced: AllPut | None = None
        self._changed = anyio.Event()

    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._given_up

    async def arrive(self) -> Prepared:
        """Take the signals of the version; return the plan that they are of.

        Raises ClosedError where that was given up, and otherwise what waiting raises.
        """
        engine = self._link.engine
        if engine.announced:
            await self._changed.wait()
        if self.is_given_up():
            raise ClosedError("the version was given up")
        signals = self._announced.signals if self._announced else None
        operation, prepared = await engine.call(
            self._link.await_signals, self.expect, signals
        )
        self.operation = operation
        if self.is_given_up():
            engine.give_up(operation)
        with self._link.naming():
            await engine.finished(operation)
        return prepared

    async def check(self, prepared: Prepared) -> None:
        """Look at the headers; raises ProtocolError for one that is wrong."""
        self._link.window.conceal()
        self.nbytes = await self._link.engine.call(
            self._link.check_headers, self.expect, prepared, self.slot
        )
        self.whole = True

    def announce(self, message: AllPut) -> None:
        """All of it was put: what is waited for now is satisfied."""
        self._announced = message
        self._changed.set()

    def give_up(self) -> None:
        """Stop waiting, where nothing says that it ends."""
        self._given_up = True
        self._changed.set()
        if self.operation is not None:
            self._link.engine.give_up(self.operation)

    async def forget(self, counts: tuple[int, ...], timeout: float) -> None:
        """Take signals of a version that was given up, which are here already."""
        engine = self._link.engine
        operation = await engine.call(self._link.take_signals, counts, timeout)
        await engine.finished(operation)
