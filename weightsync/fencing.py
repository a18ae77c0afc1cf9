"""Terms: each leader of a job has one, and knows when another has taken over.

The store counts terms, so of two leaders the one that started later has the higher. It
is read only where something has broken, which a leader that was stalled finds first of
all: its replicas are with the other.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from weightsync.channel import Endpoint, connect
from weightsync.errors import FencedError, PlanError, WeightSyncError
from weightsync.hellos import Superseded
from weightsync.messages import ToObserver
from weightsync.runtime import in_thread_for

if TYPE_CHECKING:
    from weightsync.store import Rendezvous

_encode: Final = msgspec.msgpack.Encoder().encode

TERM_KEY: Final = "term"
STORE_SECONDS: Final = 1.0
"""How long a store may take that nobody may have to wait for."""
TELL_SECONDS: Final = 1.0
"""How long a leader before this one has to hear that it was superseded."""


class Fence:
    """The term of a leader, and the look whether there is a higher one.

    ``store`` is that of others too; without one, nobody can have taken over.
    """

    def __init__(self, job: str, term: int, store: Rendezvous | None) -> None:
        self.term: Final = term
        self.store = store
        self._job = job

    async def look(self) -> FencedError | None:
        """Return the error of a leader after which another has begun, if one has.

        A store that does not answer says nothing.
        """
        store, found = self.store, self.term
        if store is not None:
            with suppress(WeightSyncError):
                found = await in_thread_for(STORE_SECONDS, store.counted, TERM_KEY)
        return self.passed(found)

    def passed(self, term: int) -> FencedError | None:
        """Return the error of a leader to which another has told its term."""
        if term <= self.term:
            return None
        return FencedError(
            f"other trainers have taken over job {self._job!r}: their term is {term}, "
            f"that of these is {self.term}"
        )


async def supersede(endpoint: Endpoint, term: int) -> None:
    """Tell the leader of a former term, if it can hear, that this one has begun."""
    body = _encode(Superseded(term))
    with suppress(WeightSyncError):
        channel = await connect(
            endpoint, body, ToObserver, timeout=TELL_SECONDS, peer="the former leader"
        )
        await channel.aclose()


def incarnation() -> str:
    """Which start of its processes this one belongs to, as its launcher says.

    torchrun names a run and counts its restarts. Where nothing says so, it is "".
    """
    run, count = (
        os.environ.get(f"TORCHELASTIC_{name}", "")
        for name in ("RUN_ID", "RESTART_COUNT")
    )
    return f"{run}#{count}"[:256] if run or count else ""


def check_incarnation(who: str, theirs: str, zero: str) -> None:
    """Raise PlanError where a rank is of another start than rank 0, this process."""
    mine = incarnation()
    if theirs != mine:
        raise PlanError(
            f"{who} belongs to another start of its job: its incarnation (run and "
            f"restart count of torchrun) is {theirs!r}, that of {zero} is {mine!r}"
        )
