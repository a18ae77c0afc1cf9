"""One push after the other, as the leader decides them.

A round begins when every trainer rank has called ``push``, is checked as a whole, and
then becomes one transfer for each replica, independent of the others: it waits until
the plans are agreed and a slot is open, moves, and is reported. The round ends once,
with the same outcome for every trainer rank. Nothing here waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from weightsync.alike import to_digest
from weightsync.checking import Checks
from weightsync.errors import ClosedError, TimedOutError, WeightSyncError
from weightsync.messages import (
    Discard,
    Expect,
    Fault,
    PushEnded,
    PushRequest,
    Put,
    PutEnded,
    Stop,
    Verified,
    Verify,
)
from weightsync.pool import After, Members, Pushed, Replica, Watcher
from weightsync.rounds import Round, Transfer, failure
from weightsync.stats import PushReport, ReplicaReport, Status

if TYPE_CHECKING:
    from collections.abc import Callable


STOP_SECONDS: Final = 2.0
"""How long all may take to give a transfer up; a slice of 4 MiB takes 0.3 ms."""


class Pushes(Watcher):
    """All rounds; the newest may be under way."""

    def __init__(self, members: Members, after: After) -> None:
        self.last_version = 0
        self._members = members
        self._after = after
        self._rounds: dict[int, Round] = {}
        self._checks = Checks(members)
        members.watcher = self

    # What trainer ranks say

    def request(self, rank: int, request: PushRequest) -> None:
        """A trainer rank called push; the last of them starts the round."""
        self._checks.learn(rank, request)
        round_ = self._rounds.setdefault(request.push, Round(request.push))
        round_.requests[rank] = request
        if round_.outcome is None and self._members.error is not None:
            self._end(round_, error=self._members.error)
        elif round_.outcome is not None:
            self._answer(round_, rank)
        else:
            if len(round_.requests) == 1:
                round_.timers.append(
                    self._after(request.timeout, lambda: self._expire(round_))
                )
            if len(round_.requests) == self._members.world_size:
                self._attempt(round_, self._check)

    def cancel(self, rank: int, push: int) -> None:
        """A trainer rank was cancelled while it pushed."""
        round_ = self._rounds.get(push)
        if round_ is not None and round_.outcome is None:
            message = f"{round_.what} was cancelled on trainer rank {rank}"
            self._give_up(round_, ClosedError(message))

    def verified(self, rank: int, answer: Verified) -> None:
        """A trainer rank digested what has to be compared."""
        round_ = self._rounds.get(answer.push)
        if round_ is None or round_.outcome is not None or round_.begun:
            return
        round_.verified[rank] = answer
        if len(round_.verified) == self._members.world_size:
            self._attempt(round_, self._compare)

    def put_ended(self, rank: int, ended: PutEnded) -> None:
        """A trainer rank puts no more to a replica."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(ended.link)
            if transfer is None or transfer.sequence != ended.sequence:
                continue
            if not transfer.moving:
                continue
            transfer.ended[rank] = ended
            if ended.fault is not None:
                self._members.suspect(transfer.replica, rank, ended.fault)
            elif transfer.stopping is not None:
                self._discard_if_stopped(transfer)

    # What replicas say

    def delivered(self, replica: Replica, sequence: int) -> None:
        """Every rank of a replica holds a version."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            expected = transfer is not None and transfer.sequence == sequence
            if transfer is not None and expected and transfer.report is None:
                self.last_version = max(self.last_version, round_.version)
                replica.version = round_.version
                self._report(round_, transfer, "delivered")

    def discarded(self, replica: Replica, sequence: int) -> None:
        """A replica has forgotten a version: nobody there holds this number."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is not None and transfer.is_stopping(sequence):
                self._fail(round_, transfer, transfer.stopping)

    def ready(self, replica: Replica) -> None:
        """Let the transfer go that waits for a replica, if nothing else is missing."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is not None:
                self._advance(round_, transfer)

    def dropped(self, replica: Replica, error: WeightSyncError, *, clean: bool) -> None:
        """A replica is gone: its transfers have failed, or are moot."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is None or transfer.report is not None:
                continue
            if clean:
                self._report(round_, transfer, "skipped", str(error), removed=True)
            else:
                self._fail(round_, transfer, error, removed=True)

    def failed(self, error: WeightSyncError) -> None:
        """A trainer rank is gone: no round can succeed."""
        for round_ in list(self._rounds.values()):
            if round_.outcome is None:
                self._end(round_, error=error)

    # Checking

    def _attempt(self, round_: Round, step: Callable[[Round], None]) -> None:
        try:
            step(round_)
        except WeightSyncError as error:
            self._end(round_, error=error)

    def _check(self, round_: Round) -> None:
        self._checks.check(round_, self.last_version)
        if not round_.alike:
            self._begin(round_)
            return
        asked = to_digest(round_.alike, self._members.world_size)
        for rank, peer in self._members.trainers.items():
            peer.post(Verify(round_.push, asked[rank]))

    def _compare(self, round_: Round) -> None:
        self._checks.compare(round_)
        self._begin(round_)

    # Moving

    def _begin(self, round_: Round) -> None:
        round_.begun = True
        round_.started = time.monotonic()
        for transfer in list(round_.transfers.values()):
            if transfer.replica.gone:
                self._report(round_, transfer, "skipped", "it left", removed=True)
            else:
                self._advance(round_, transfer)

    def _advance(self, round_: Round, transfer: Transfer) -> None:
        """Let a transfer go once the plans are agreed and there is credit for it."""
        replica, layout = transfer.replica, round_.layout
        if not round_.begun or layout is None or not transfer.waiting:
            return
        if replica.credit is None and round_.terms.on_busy == "skip":
            reason = "busy: the version before is not switched in yet"
            self._report(round_, transfer, "skipped", reason)
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
        expect = Expect(put.sequence, put.version, layout)
        self._members.move(replica, expect, put)

    def _expire(self, round_: Round) -> None:
        if round_.outcome is not None:
            return
        seconds = min(request.timeout for request in round_.requests.values())
        if round_.begun:
            for transfer in list(round_.transfers.values()):
                self._expire_transfer(round_, transfer, seconds)
            return
        ranks = set(range(self._members.world_size))
        if ranks > set(round_.requests):
            absent, what = ranks - set(round_.requests), "call push"
        else:
            absent, what = ranks - set(round_.verified), "compare its tensors"
        who = ", ".join(str(rank) for rank in sorted(absent))
        message = (
            f"{round_.what} timed out after {seconds} s: trainer rank {who} did not "
            f"{what}"
        )
        self._end(round_, error=TimedOutError(message))

    def _expire_transfer(
        self, round_: Round, transfer: Transfer, seconds: float
    ) -> None:
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
            self._fail(round_, transfer, TimedOutError(reason))

    def _give_up(self, round_: Round, error: WeightSyncError) -> None:
        round_.fault = error
        if not round_.begun:
            self._end(round_, error=error)
            return
        for transfer in list(round_.transfers.values()):
            if transfer.report is not None:
                continue
            if transfer.sequence is None:
                self._fail(round_, transfer, error)
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
        ranks = range(self._members.world_size)
        if len(transfer.ended) < len(ranks) or transfer.sequence is None:
            return
        signals = tuple(
            tuple(transfer.ended[rank].signals[generator] for rank in ranks)
            for generator in range(len(transfer.replica.manifests))
        )
        transfer.replica.peer.post(Discard(transfer.sequence, signals))

    # Reporting

    def _fail(
        self,
        round_: Round,
        transfer: Transfer,
        error: WeightSyncError | None,
        *,
        removed: bool = False,
    ) -> None:
        transfer.error = error
        self._report(round_, transfer, "failed", str(error), removed=removed)

    def _report(
        self,
        round_: Round,
        transfer: Transfer,
        status: Status,
        reason: str = "",
        *,
        removed: bool = False,
    ) -> None:
        seconds = time.monotonic() - round_.started
        transfer.report = ReplicaReport(status, reason, removed, seconds)
        ended = Pushed(round_.version, status, reason, time.monotonic())
        transfer.replica.pushed = ended
        reports = {
            t.replica.name: t.report
            for t in round_.transfers.values()
            if t.report is not None
        }
        if len(reports) < len(round_.transfers) or round_.outcome is not None:
            return
        nbytes = sum(
            [
                t.fit.nbytes
                for t in round_.transfers.values()
                if t.report is not None and t.report.status == "delivered"
            ]
        )
        report = PushReport(round_.version, nbytes, seconds, reports)
        self._end(round_, report=report, error=round_.fault or failure(round_, report))

    def _end(
        self,
        round_: Round,
        *,
        report: PushReport | None = None,
        error: WeightSyncError | None = None,
    ) -> None:
        fault = None if error is None else Fault.of(error)
        round_.outcome = PushEnded(round_.push, report, fault)
        for timer in round_.timers:
            timer.cancel()
        for rank in round_.requests:
            self._answer(round_, rank)

    def _answer(self, round_: Round, rank: int) -> None:
        if rank in round_.answered or round_.outcome is None:
            return
        round_.answered.add(rank)
        if rank in self._members.trainers:
            self._members.trainers[rank].post(round_.outcome)
        if len(round_.answered) == self._members.world_size:
            self._rounds.pop(round_.push, None)
