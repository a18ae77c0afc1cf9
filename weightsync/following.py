"""Following a job: the membership and its events, over a channel to the leader."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from weightsync.elastic import Propose
from weightsync.errors import TimedOutError, WeightSyncError
from weightsync.membership import (
    AskMembership,
    EventLog,
    Happened,
    Membership,
    MembershipEvent,
    TellMembership,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.peer import Peer

ABSENT_SECONDS: Final = 1.0
"""How long a call that is out of time already may take to learn who is absent."""


class Following:
    """What one party knows of the members. Runs in the loop of its runtime.

    Only ``number`` may be read by other threads.
    """

    def __init__(self, leader: Peer) -> None:
        self._leader = leader
        self._log = EventLog()
        self._asked = 0
        self._answers: dict[int, Membership | None] = {}
        self._changed = anyio.Event()
        self._error: WeightSyncError | None = None

    @property
    def number(self) -> int:
        """The number of the last event that is known here."""
        return self._log.number

    async def ask(self, timeout: float) -> Membership:
        """Return the membership as the leader knows it now.

        Raises TimedOutError, or why there will be no answer.
        """
        return await self._request(AskMembership, timeout)

    async def absent(self) -> str:
        """Say who is not in the pool, and who failed last, for a message.

        Empty where that is not known.
        """
        with suppress(WeightSyncError):
            members = await self.ask(ABSENT_SECONDS)
            failed = self._log.last_failure(members.replicas)
            return "".join([f"; {one}" for one in (*members.absent, failed) if one])
        return ""

    async def propose(
        self, names: tuple[str, ...] | None, timeout: float
    ) -> Membership:
        """Let these names be the pool; return the membership after that.

        Raises what ``ask`` raises. The proposal may be in force nevertheless.
        """
        return await self._request(partial(Propose, names=names), timeout)

    async def _request(
        self, make: Callable[[int], AskMembership | Propose], timeout: float
    ) -> Membership:
        self._asked += 1
        number = self._asked
        self._answers[number] = None
        self._leader.post(make(number))
        try:
            with anyio.move_on_after(timeout):
                return await self._answer(number)
        finally:
            del self._answers[number]
        raise TimedOutError(f"{self._leader.name} did not answer within {timeout} s")

    async def _answer(self, number: int) -> Membership:
        while (answer := self._answers[number]) is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return answer

    async def next(self, number: int) -> MembershipEvent:
        """Return the first event after a number; wait for it where there is none yet.

        Raises why there will be no more, after all that came before.
        """
        while (event := self._log.after(number)) is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return event

    def handle(self, message: Happened | TellMembership) -> None:
        """Act on what the leader says."""
        if isinstance(message, Happened):
            self._log.extend(message.events)
        elif message.number in self._answers:
            self._answers[message.number] = message.membership
        self._notify()

    def end(self, error: WeightSyncError) -> None:
        """There will be nothing more, for this reason; the first counts."""
        if self._error is None:
            self._error = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
