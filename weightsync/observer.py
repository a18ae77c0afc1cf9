"""Observer: follows a job from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.admittance import check_names
from weightsync.base import Transport
from weightsync.core import DEFAULT_TIMEOUT, observer_core
from weightsync.events import Events
from weightsync.observing import ObserverSession
from weightsync.vigil import DEFAULT_LEASE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.membership import Membership


class Observer(Transport[ObserverSession]):
    """Follows the membership of a running job, and may drive it; is no part of it.

    For schedulers, dashboards, and processes of generators: enter it with ``async
    with`` in any process that can read the store. It never delays the job: an observer
    that is slow, stuck or gone is dropped. Not bound to an event loop.

    Args:
        address: of the trainers' store; ``WEIGHTSYNC_STORE`` by default.
        job: distinguishes jobs that share a store.
        timeout: seconds for opening, and for calls that are given none.
        lease: seconds without a sign of life after which it is dropped; see
            ``Trainer``.

    Raises (on entering) TimedOutError when the trainers do not come, PeerError when
    they have failed, or there are 64 observers already.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        lease: float = DEFAULT_LEASE,
    ) -> None:
        super().__init__(observer_core(address, job, timeout, lease), timeout)

    async def membership(self, *, timeout: float | None = None) -> Membership:
        """Return who is in the job now; see ``Trainer.membership``."""
        session = self._core.session
        seconds = self._seconds(timeout)
        return await self._core.runtime.acall(session.following.ask, seconds)

    async def propose(
        self, replicas: Iterable[str] | None, *, timeout: float | None = None
    ) -> Membership:
        """Let the pool be the replicas of these names; see ``Trainer.propose``."""
        names = None if replicas is None else check_names(replicas)
        session = self._core.session
        seconds = self._seconds(timeout)
        following = session.following
        return await self._core.runtime.acall(following.propose, names, seconds)

    def events(self, *, after: int | None = None) -> Events:
        """Return an async iterator over membership events; see ``Trainer.events``."""
        following = self._core.session.following
        number = following.number if after is None else after
        return Events(self._core.runtime, following, number)
