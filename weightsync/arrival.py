"""A version on its way into a slot of a generator rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightsync.messages import Discard, Expect
    from weightsync.window import Operation


class Arrival:
    """A version on its way into a slot."""

    def __init__(self, expect: Expect, slot: int) -> None:
        self.expect: Final = expect
        self.slot: Final = slot
        self.operation: Operation | None = None
        self.discard: Discard | None = None
        self.whole = False
        self.nbytes = 0
