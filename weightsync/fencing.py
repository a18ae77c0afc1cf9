"""Terms: each leader of a job has one, and knows when another has taken over.

The store counts terms, so of two leaders the one that started later has the higher. It
is read only where something has broken, which a leader that was stalled finds first of
all: its replicas are with the other.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from weightsync.channel import Endpoint, connect
from weightsync.errors import (
    FencedError,
    OtherStartError,
    PlanError,
    WeightSyncError,
)
from weightsync.hellos import Superseded
from weightsync.messages import Ended, ToObserver
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


async def supersede(endpoint: Endpoint, term: int) -> WeightSyncError | None:
    """Tell a former leader or hub, if it can hear, that this one has begun.

    Returns why it does not give way, where it says so.
    """
    body = _encode(Superseded(term))
    with suppress(WeightSyncError), anyio.move_on_after(2 * TELL_SECONDS):
        channel = await connect(
            endpoint, body, ToObserver, timeout=TELL_SECONDS, peer="the former one"
        )
        async with channel:
            answer = await channel.receive()
            if isinstance(answer, Ended) and answer.fault is not None:
                return answer.fault.error()
    return None


def incarnation() -> str:
    """Which start of its processes this one belongs to, as its launcher says.

    torchrun names a run and counts its restarts; others may set
    ``WEIGHTSYNC_INCARNATION``. Where nothing says so, it is "".
    """
    given = os.environ.get("WEIGHTSYNC_INCARNATION", "")
    if given:
        return given[:256]
    run, count = (
        os.environ.get(f"TORCHELASTIC_{name}", "")
        for name in ("RUN_ID", "RESTART_COUNT")
    )
    return f"{run}#{count}"[:256] if run or count else ""


def check_incarnation(who: str, theirs: str, zero: str) -> None:
    """Raise PlanError where a rank is of another start than rank 0, this process.

    OtherStartError where that start is not known to be a former one.
    """
    mine = incarnation()
    if theirs != mine:
        kind = PlanError if _is_former(theirs, mine) else OtherStartError
        raise kind(
            f"{who} belongs to another start of its job: its incarnation (run and "
            f"restart count of torchrun) is {theirs!r}, that of {zero} is {mine!r}"
        )


def _is_former(theirs: str, mine: str) -> bool:
    """Whether one incarnation is known to be before another of the same run."""
    (run, before), (same, count) = _run_and_count(theirs), _run_and_count(mine)
    return run == same and before < count


def _run_and_count(incarnation: str) -> tuple[str, int]:
    """Take an incarnation of torchrun apart; any other one counts nothing."""
    run, _, count = incarnation.rpartition("#")
    return (run, int(count)) if count.isdecimal() else (incarnation, 0)
