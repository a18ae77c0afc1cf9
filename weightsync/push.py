"""One push after the other, as the leader decides them.

A round begins when every trainer rank has called ``push``, is checked as a whole, and
then becomes one transfer for each replica, independent of the others: it waits until
the plans are agreed and a slot is open, moves, and is reported. The round ends once,
with the same outcome for every trainer rank. Nothing here waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightsync.alike import to_digest
from weightsync.checking import Checks
from weightsync.counting import Held
from weightsync.errors import ClosedError, PeerError, TimedOutError, WeightSyncError
from weightsync.messages import (
    Fault,
    PushEnded,
    PushRequest,
    PutEnded,
    Verified,
    Verify,
)
from weightsync.replays import Replay, Replays
from weightsync.rounds import Round, Transfer, failure
from weightsync.transfers import Transfers
from weightsync.watching import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.agreement import Agreement
    from weightsync.elastic import Kept
    from weightsync.pool import After, Members
    from weightsync.replica import Replica
    from weightsync.stats import PushReport


class Pushes(Watcher):
    """All rounds. The newest push may be under way, and replays beside it."""

    def __init__(self, members: Members, after: After, *, replay: bool = False) -> None:
        self._members = members
        self._after = after
        self._rounds: dict[int, Round] = {}
        self._checks = Checks(members)
        self._transfers = Transfers(members, after, self._reported)
        self._replays = Replays(self, members, after, enabled=replay)
        members.watcher = self

    @property
    def last_version(self) -> int:
        """The last that any replica was delivered, or held when it joined."""
        return self._members.counting.floor.version

    # What trainer ranks say

    def request(self, rank: int, request: PushRequest) -> None:
        """A trainer rank called push; the last of them starts the round."""
        self._checks.learn(rank, request)
        round_ = self._rounds.setdefault(request.push, Round(request.push))
        round_.requests[rank] = request
        if round_.outcome is None and self._members.error is not None:
            self._finish(round_, error=self._members.error)
        elif round_.outcome is not None:
            self._answer(round_, rank)
        elif not round_.ending:
            self._limit(round_, request.timeout)
            if len(round_.requests) == self._members.world_size:
                self._attempt(round_, self._check)

    def _limit(self, round_: Round, seconds: float) -> None:
        """Let a round end by then; the first limit of all ranks counts."""
        deadline = time.monotonic() + seconds
        if deadline < round_.deadline:
            round_.deadline = deadline
            timer = self._after(seconds, lambda: self._expire(round_))
            round_.timers.append(timer)

    def cancel(self, rank: int, push: int) -> None:
        """A trainer rank was cancelled while it pushed."""
        round_ = self._rounds.get(push)
        if round_ is not None and round_.outcome is None:
            message = f"{round_.what} was cancelled on trainer rank {rank}"
            self.give_up(round_, ClosedError(message))

    def verified(self, rank: int, answer: Verified) -> None:
        """A trainer rank digested what has to be compared."""
        round_ = self._rounds.get(answer.push) or self._replays.numbered(answer.push)
        if round_ is None or round_.outcome is not None or round_.begun:
            return
        round_.verified[rank] = answer
        if len(round_.verified) == self._members.world_size:
            self._attempt(round_, self._compare)

    def put_ended(self, rank: int, ended: PutEnded) -> None:
        """A trainer rank puts no more to a replica."""
        for _, transfer in self.rounds_to(ended.link):
            self._transfers.put_ended(transfer, rank, ended)

    def kept(self, rank: int, message: Kept) -> None:
        """A trainer rank keeps what it pushed; with the last of them it is replayed."""
        self._replays.kept(rank, message.push)

    # What replicas say

    def delivered(self, replica: Replica, sequence: int) -> None:
        """Every rank of a replica holds a version."""
        for round_, transfer in self.rounds_to(replica.link):
            if transfer.sequence == sequence and transfer.report is None:
                replica.last = held = Held(round_.epoch, round_.version)
                self._members.counting.delivered(held)
                replica.epoch, replica.version = held
                replica.behind = replica.reopening = False
                self._transfers.report(round_, transfer, "delivered")

    def discarded(self, replica: Replica, sequence: int) -> None:
        """A replica has forgotten a version: nobody there holds this number."""
        for round_, transfer in self.rounds_to(replica.link):
            if transfer.is_stopping(sequence):
                self._transfers.fail(round_, transfer, transfer.stopping)

    def formed(self, replica: Replica) -> Agreement | None:
        """Let all plan for a new replica at once, so that no push waits for that."""
        layout = self._checks.expected(replica)
        return None if layout is None else self._members.agreement(replica, layout)

    def joined(self, replica: Replica) -> None:
        """Replay what is kept to a new replica."""
        self._replays.look(replica)

    def ready(self, replica: Replica) -> None:
        """Let the transfer go that waits for a replica, if nothing else is missing."""
        for round_, transfer in self.rounds_to(replica.link):
            self._transfers.advance(round_, transfer)

    def dropped(self, replica: Replica, error: WeightSyncError, *, clean: bool) -> None:
        """A replica is gone: its transfers have failed, or are moot."""
        for round_, transfer in self.rounds_to(replica.link):
            if transfer.report is not None:
                continue
            if clean:
                self._transfers.report(
                    round_, transfer, "skipped", str(error), removed=True
                )
            else:
                self._transfers.fail(round_, transfer, error, removed=True)

    def failed(self, error: WeightSyncError) -> None:
        """A trainer rank is gone: no round can succeed."""
        for round_ in [*self._rounds.values(), *self._replays.under_way]:
            if round_.outcome is None:
                self._finish(round_, error=error)

    # Replays

    def rounds_to(self, link: int) -> list[tuple[Round, Transfer]]:
        """The rounds that concern a replica, and their transfers to it."""
        rounds = [*self._rounds.values(), *self._replays.to(link)]
        return [(r, r.transfers[link]) for r in rounds if link in r.transfers]

    def replay(self, replay: Replay) -> None:
        """Begin a replay."""
        self._attempt(replay, self._check)

    # Checking

    def _attempt(self, round_: Round, step: Callable[[Round], None]) -> None:
        try:
            step(round_)
        except WeightSyncError as error:
            self._end(round_, error=error)

    def _check(self, round_: Round) -> None:
        round_.started = time.monotonic()
        if isinstance(round_, Replay):
            self._checks.check_replay(round_)
        else:
            self._checks.check(round_)
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
        if not isinstance(round_, Replay):
            self._replays.give_up(round_.transfers, f"for {round_.what}")
        for transfer in list(round_.transfers.values()):
            self._transfers.advance(round_, transfer)

    def _expire(self, round_: Round) -> None:
        if round_.outcome is not None:
            return
        seconds = min(request.timeout for request in round_.requests.values())
        if round_.begun:
            for transfer in list(round_.transfers.values()):
                self._transfers.expire(round_, transfer, seconds)
            return
        awaited = round_.awaited(self._members.world_size)
        message = f"{round_.what} timed out after {seconds} s: {awaited}"
        self._end(round_, error=TimedOutError(message))

    def give_up(self, round_: Round, error: WeightSyncError) -> None:
        """Let a round fail as soon as it can end."""
        round_.fault = error
        if not round_.begun:
            self._end(round_, error=error)
            return
        for transfer in list(round_.transfers.values()):
            self._transfers.give_up(round_, transfer, error)

    # Ending

    def _reported(self, round_: Round) -> None:
        """A transfer was reported: with the last of them the round ends."""
        if round_.outcome is not None or round_.waits:
            return
        report = round_.report(time.monotonic() - round_.started)
        self._end(round_, report=report, error=round_.fault or failure(round_, report))

    def _end(
        self,
        round_: Round,
        *,
        report: PushReport | None = None,
        error: WeightSyncError | None = None,
    ) -> None:
        """End a round; where peers failed, not before it is known that none else did.

        Trainers that were stalled find their replicas gone: because others took over.
        """
        if isinstance(error, PeerError | TimedOutError):
            round_.ending = True
            self._members.assure(lambda: self._finish(round_, report, error))
        else:
            self._finish(round_, report, error)

    def _finish(
        self,
        round_: Round,
        report: PushReport | None = None,
        error: WeightSyncError | None = None,
    ) -> None:
        if round_.outcome is not None:
            return
        fault = None if error is None else Fault.of(error)
        keep = self._replays.keep(round_, report)
        round_.outcome = PushEnded(round_.push, report, fault, keep)
        for timer in round_.timers:
            timer.cancel()
        if isinstance(round_, Replay):
            self._replays.ended(round_, error)
            return
        for rank in round_.requests:
            self._answer(round_, rank)
        self._replays.look_again()

    def _answer(self, round_: Round, rank: int) -> None:
        if rank in round_.answered or round_.outcome is None:
            return
        round_.answered.add(rank)
        if rank in self._members.trainers:
            self._members.trainers[rank].post(round_.outcome)
        if len(round_.answered) == self._members.world_size:
            self._rounds.pop(round_.push, None)
