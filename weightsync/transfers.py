"""The ways of a round to its replicas: each waits, moves, is stopped, or is reported.

What becomes of one concerns no other. Nothing here waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from weightsync.announcing import AllPut
from weightsync.errors import TimedOutError, WeightSyncError
from weightsync.messages import Discard, Expect, Put, Stop
from weightsync.replays import Replay
from weightsync.replica import Pushed
from weightsync.stats import ReplicaReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.messages import PutEnded
    from weightsync.pool import After, Members
    from weightsync.rounds import Round, Transfer
    from weightsync.stats import Status

STOP_SECONDS: Final = 2.0
"""How long all may take to give a transfer up; a slice of 4 MiB takes 0.3 ms."""


class Transfers:
    """Carries transfers out; ``reported`` is called after each report of a round."""

    def __init__(
        self, members: Members, after: After, reported: Callable[[Round], None]
    ) -> None:
        self._members: Final = members
        self._after: Final = after
        self._reported: Final = reported

    # Moving

    def advance(self, round_: Round, transfer: Transfer) -> None:
        """Let a transfer go once the plans are agreed and there is credit for it."""
        replica, layout = transfer.replica, round_.layout
        if not round_.begun or layout is None or not transfer.waiting:
            return
        busy = replica.credit is None and not replica.reopening
        if busy and round_.terms.on_busy == "skip":
            reason = "busy: the version before is not switched in yet"
            self.report(round_, transfer, "skipped", reason)
            return
        agreement = self._members.agreement(replica, layout)
        if agreement.complete and replica.credit is not None:
            slot, replica.credit = replica.credit, None
            self._move(round_, transfer, layout.digest, slot)

    def _move(
        self, round_: Round, transfer: Transfer, layout: bytes, slot: int
    ) -> None:
        replica = transfer.replica
        replica.sequence += 1
        transfer.sequence = replica.sequence
        put = Put(
            push=round_.push,
            link=replica.link,
            sequence=replica.sequence,
            slot=slot,
            version=round_.version,
            layout=layout,
        )
        expect = Expect(put.sequence, put.version, layout, round_.epoch)
        self._members.move(replica, expect, put)

    def put_ended(self, transfer: Transfer, rank: int, ended: PutEnded) -> None:
        """A trainer rank puts no more to a replica."""
        if transfer.sequence != ended.sequence or not transfer.moving:
            return
        fault = transfer.fault_of(ended)
        if fault is not None:
            self._members.suspect(transfer.replica, rank, fault)
            return
        transfer.ended[rank] = ended
        if transfer.stopping is not None:
            self._discard_if_stopped(transfer)
        elif transfer.replica.engine != "shm":
            self._announce_if_put(transfer)

    def _announce_if_put(self, transfer: Transfer) -> None:
        if transfer.has_signals(self._members.world_size):
            transfer.replica.peer.post(AllPut(transfer.number, transfer.signals))

    # Giving up

    def expire(self, round_: Round, transfer: Transfer, seconds: float) -> None:
        """A round is out of time after so many seconds."""
        if transfer.report is not None:
            return
        if transfer.sequence is None:
            self._expire_waiting(round_, transfer, seconds)
        elif len(transfer.ended) == self._members.world_size:
            reason = f"timed out: it did not confirm the version within {seconds} s"
            self._members.drop(transfer.replica, TimedOutError(reason))
        else:
            reason = f"timed out: not all was put in {seconds} s"
            self._stop(round_, transfer, TimedOutError(reason))

    def _expire_waiting(
        self, round_: Round, transfer: Transfer, seconds: float
    ) -> None:
        """A replica that is busy stays in the pool; one that does not answer goes."""
        replica, layout = transfer.replica, round_.layout
        agreement = None if layout is None else replica.layouts.get(layout.digest)
        if agreement is None or agreement.complete:
            reason = f"timed out: it opened no slot within {seconds} s (busy or stuck)"
        else:
            reason = f"timed out: no plan from {agreement.awaited} within {seconds} s"
        if agreement is not None and agreement.replica_is_missing:
            self._members.drop(replica, TimedOutError(reason))
        else:
            self.fail(round_, transfer, TimedOutError(reason))

    def give_up(
        self, round_: Round, transfer: Transfer, error: WeightSyncError
    ) -> None:
        """Let a transfer fail as soon as it can end."""
        if transfer.report is not None:
            return
        if transfer.sequence is None:
            self.fail(round_, transfer, error)
        else:
            self._stop(round_, transfer, error)

    def _stop(self, round_: Round, transfer: Transfer, error: WeightSyncError) -> None:
        if transfer.stopping is not None or transfer.sequence is None:
            return
        transfer.stopping = error
        self._members.tell_trainers(Stop(transfer.replica.link, transfer.sequence))

        def expire() -> None:
            if transfer.report is None:
                why = f"{error}; giving it up took longer than {STOP_SECONDS} s"
                self._members.drop(transfer.replica, type(error)(why))

        round_.timers.append(self._after(STOP_SECONDS, expire))
        self._discard_if_stopped(transfer)

    def _discard_if_stopped(self, transfer: Transfer) -> None:
        if transfer.has_signals(self._members.world_size):
            transfer.replica.peer.post(Discard(transfer.number, transfer.signals))

    # Reporting

    def fail(
        self,
        round_: Round,
        transfer: Transfer,
        error: WeightSyncError | None,
        *,
        removed: bool = False,
    ) -> None:
        """Report that a replica was not delivered to, and why."""
        transfer.error = error
        self.report(round_, transfer, "failed", str(error), removed=removed)

    def report(
        self,
        round_: Round,
        transfer: Transfer,
        status: Status,
        reason: str = "",
        *,
        removed: bool = False,
    ) -> None:
        """Say what became of a transfer; the last one ends its round."""
        seconds = time.monotonic() - round_.started
        transfer.report = ReplicaReport(status, reason, removed, seconds)
        if not isinstance(round_, Replay) or status == "delivered":
            now = time.monotonic()
            pushed = Pushed(round_.version, status, reason, now, round_.epoch)
            transfer.replica.pushed = pushed
        self._reported(round_)
