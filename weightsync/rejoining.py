"""A generator rank as its user sees it: it outlives its trainers, and joins again.

When its replica is out of the pool, ``receive`` says so once. The next one joins again,
over new channels and with new memory, and nothing of the former link is left.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
from msgspec import structs

from weightsync.errors import (
    ClosedError,
    FencedError,
    PeerError,
    PlanError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.joining import Joining
from weightsync.member import Member
from weightsync.runtime import OwnTasks
from weightsync.session import Session

if TYPE_CHECKING:
    from weightsync.engine import Engine
    from weightsync.epoch import Mode
    from weightsync.layout import Registered
    from weightsync.place import Place
    from weightsync.reading import Reading
    from weightsync.runtime import Tasks
    from weightsync.stats import Update

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 0.5
"""Between two attempts to join again: a leader that has failed may stay there."""

LATE_SECONDS: Final = 0.25
"""An attempt that runs into the timeout knows why, and comes first."""


class GeneratorSession(Session):
    """A generator rank; it is in the pool while ``_joining`` is there."""

    def __init__(
        self,
        place: Place,
        tasks: Tasks,
        *,
        replica: str,
        mode: Mode,
        registered: Registered,
        engine: Engine,
    ) -> None:
        super().__init__(place, tasks)
        self._member: Final = Member(replica, mode, registered, engine)
        self._joining: Joining | None = None
        self._put_away = anyio.Event()
        self._put_away.set()
        self._turn = anyio.Lock()
        self._attempt = anyio.CancelScope()
        self._closed = False
        self._crash: WeightSyncError | None = None
        tasks.on_crash = self._crashed

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self._member.replica

    @property
    def reading(self) -> Reading:
        """Versions and leases."""
        return self._member.reading

    def note(self) -> None:
        """What this thread gave the device to do until now comes before a switch."""
        self._member.engine.note()

    async def receive(self, timeout: float | None) -> Update:
        """Wait for the next whole version and switch it in; see ``Generator``."""
        started = anyio.current_time()
        joining, left, passed = self._joining, timeout, 0.0
        if joining is None:
            joining = await self._present(timeout)
            passed = anyio.current_time() - started
            if timeout is not None:
                left = max(round(timeout - passed, 3), 0.0)
        try:
            update = await joining.rank.receive(left)
            return structs.replace(update, waited=passed + update.waited)
        except WeightSyncError as error:
            if error is joining.rank.error:
                self._retire(joining)
            if not isinstance(error, FencedError) or joining.rank.was_in:
                raise
        # Its hub was of a former start of the replica: there is another now.
        self._check()
        spent = anyio.current_time() - started
        return await self.receive(None if timeout is None else max(timeout - spent, 0))

    async def _join(self) -> None:
        """Join; return when this rank was accepted."""
        deadline = anyio.current_time() + self.place.timeout
        place = self.place
        while True:
            own = OwnTasks(self._tasks)
            joining = Joining(place, own, self._member, again=False)
            try:
                await joining.open()
            except PlanError:
                if not joining.misled:
                    raise
                left = max(deadline - anyio.current_time(), LATE_SECONDS)
                place = replace(place, timeout=left)
            else:
                break
        self._joining = joining
        self.address = joining.address

    async def _leave(self) -> None:
        """Leave the pool, or give up joining it."""
        self._closed = True
        self._attempt.cancel()
        async with self._turn:
            joining, self._joining = self._joining, None
        if joining is not None:
            await joining.close()
        await self._put_away.wait()

    # Joining again

    async def _present(self, timeout: float | None) -> Joining:
        """Return the membership to receive from: a new one, where there is none."""
        seconds = math.inf if timeout is None else timeout
        deadline = anyio.current_time() + seconds
        with anyio.CancelScope(deadline=deadline) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            message = f"another receive was joining again for more than {timeout} s"
            raise TimedOutError(message)
        try:
            if self._joining is None:
                self._joining = await self._join_again(deadline, timeout)
            return self._joining
        finally:
            self._turn.release()

    async def _join_again(self, deadline: float, timeout: float | None) -> Joining:
        """Attempt it until it succeeds; what fails leaves nothing behind."""
        reason = "its link was not formed"
        pause = FIRST_PAUSE
        with anyio.CancelScope(deadline=deadline + LATE_SECONDS) as self._attempt:
            while anyio.current_time() < deadline:
                self._check()
                try:
                    return await self._try(deadline - anyio.current_time())
                except (PeerError, ClosedError, TimedOutError) as error:
                    reason = str(error)
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._check()
        who = f"rank {self.place.rank} of replica {self.replica!r}"
        raise TimedOutError(f"{who} did not join again within {timeout} s: {reason}")

    async def _try(self, seconds: float) -> Joining:
        await self._put_away.wait()
        place = replace(self.place, timeout=seconds)
        joining = Joining(place, OwnTasks(self._tasks), self._member, again=True)
        try:
            await joining.open()
        except PlanError as error:
            if joining.misled:
                raise PeerError(str(error)) from error
            raise
        try:
            await joining.formed()
        except BaseException:
            await joining.close()
            raise
        return joining

    def _check(self) -> None:
        if self._crash is not None:
            raise self._crash
        if self._closed:
            raise ClosedError("the generator is closed")
        if self._member.replaced:
            message = f"another process has become rank 0 of replica {self.replica!r}"
            raise FencedError(message)

    def _retire(self, joining: Joining) -> None:
        """Take a membership down that has ended; after a crash of ours it stays."""
        if self._joining is not joining or self._crash is not None or self._closed:
            return
        self._joining = None
        self._put_away = anyio.Event()
        self._tasks.start_soon(self._take_down, joining, self._put_away)

    async def _take_down(self, joining: Joining, done: anyio.Event) -> None:
        try:
            await joining.close()
        finally:
            done.set()

    def _crashed(self, error: WeightSyncError) -> None:
        """Something of ours failed that should not have: nothing can be trusted now."""
        self._crash = error
        if self._joining is not None:
            self._joining.rank.fail(error)
        self._attempt.cancel()
