"""One push after the other, as the leader decides them.

A round begins when every trainer rank has called ``push``, is checked as a whole, and
then becomes one transfer for each replica, independent of the others. It ends once,
with the same outcome for every trainer rank. Nothing here waits.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from weightsync.errors import (
    ClosedError,
    PeerError,
    PlanError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.messages import (
    Discard,
    Expect,
    Fault,
    Layout,
    PushEnded,
    PushRequest,
    Put,
    PutEnded,
    Remembered,
    Stop,
    Verified,
    Verify,
)
from weightsync.plan import Plan, check, make_plan
from weightsync.pool import After, Members, Replica, Watcher
from weightsync.rounds import Round, Transfer, failure
from weightsync.spec import Manifest, validate_manifest
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
        self._manifests: dict[int, Remembered[bytes, Manifest]] = {}
        members.watcher = self

    # What trainer ranks say

    def request(self, rank: int, request: PushRequest) -> None:
        """A trainer rank called push; the last of them starts the round."""
        self._learn(rank, request)
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
        """A trainer rank compared the values of tied names."""
        round_ = self._rounds.get(answer.push)
        if round_ is None or round_.outcome is not None or round_.begun:
            return
        round_.verified[rank] = answer
        if len(round_.verified) == self._members.world_size:
            self._attempt(round_, self._check_verified)

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
                error = ended.fault.error(f"trainer rank {rank}: ")
                self._members.drop(transfer.replica, str(error))
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
                self._report(round_, transfer, "delivered")

    def discarded(self, replica: Replica, sequence: int) -> None:
        """A replica has forgotten a version: nobody there holds this number."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is not None and transfer.is_stopping(sequence):
                self._report(round_, transfer, "failed", transfer.stopping or "")

    def credited(self, replica: Replica) -> None:
        """Use a credit for the transfer that waits for it."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is not None and transfer.waiting:
                self._move(round_, transfer)

    def dropped(self, replica: Replica, reason: str, *, clean: bool) -> None:
        """A replica is gone: its transfers have failed, or are moot."""
        for round_ in list(self._rounds.values()):
            transfer = round_.transfers.get(replica.link)
            if transfer is not None and transfer.report is None:
                status: Status = "skipped" if clean else "failed"
                self._report(round_, transfer, status, reason, removed=True)

    def failed(self, error: WeightSyncError) -> None:
        """A trainer rank is gone: no round can succeed."""
        for round_ in list(self._rounds.values()):
            if round_.outcome is None:
                self._end(round_, error=error)

    # Checking

    def _learn(self, rank: int, request: PushRequest) -> None:
        known = self._manifests.setdefault(rank, Remembered())
        if request.manifest is not None:
            validate_manifest(request.manifest)
            if request.manifest.digest != request.digest:
                raise ProtocolError(f"trainer rank {rank} sent a wrong digest")
            known.put(request.digest, request.manifest)
        elif request.fault is None and not known.use(request.digest):
            raise ProtocolError(f"trainer rank {rank} named an unknown manifest")

    def _attempt(self, round_: Round, step: Callable[[Round], None]) -> None:
        try:
            step(round_)
        except WeightSyncError as error:
            self._end(round_, error=error)

    def _check(self, round_: Round) -> None:
        requests = [round_.requests[rank] for rank in range(self._members.world_size)]
        for rank, request in enumerate(requests):
            if request.fault is not None:
                raise request.fault.error(f"trainer rank {rank}: ")
        self._check_version(round_, requests)
        round_.layout = self._layout(requests)
        replicas = self._members.active
        if not replicas:
            raise PeerError(f"{round_.what}: {self._nobody()}")
        partial = requests[0].partial
        for replica in replicas:
            found = self._plan(replica, round_.layout, partial=partial)
            round_.transfers[replica.link] = Transfer(replica, *found)
        ties = {pair for t in round_.transfers.values() for pair in t.plan.ties}
        if ties:
            round_.pairs = tuple(sorted(ties))
            self._members.tell_trainers(Verify(round_.push, round_.pairs))
        else:
            self._begin(round_)

    def _check_version(self, round_: Round, requests: list[PushRequest]) -> None:
        first = requests[0]
        for rank, request in enumerate(requests):
            for field in ("version", "partial", "on_busy", "require"):
                mine, theirs = getattr(first, field), getattr(request, field)
                if mine != theirs:
                    message = (
                        f"trainer ranks disagree in their push number {round_.push}: "
                        f"{field} is {mine!r} on rank 0 and {theirs!r} on rank {rank}"
                    )
                    raise PlanError(message)
        version = self.last_version + 1 if first.version is None else first.version
        if version <= self.last_version:
            message = (
                f"version {version} does not increase: version {self.last_version} was "
                "delivered before"
            )
            raise PlanError(message)
        round_.version = version

    def _layout(self, requests: list[PushRequest]) -> Layout:
        digests = [request.digest for request in requests]
        manifests = [self._manifests[i][digest] for i, digest in enumerate(digests)]
        together = blake2b(b"".join(digests), digest_size=16).digest()
        return Layout(together, tuple(manifests))

    def _plan(
        self, replica: Replica, layout: Layout, *, partial: bool
    ) -> tuple[Plan, int]:
        """The plan, and the bytes of it, for a push that fits the replica."""
        key = (layout.digest, partial)
        if not replica.plans.use(key):
            check(
                layout.manifests,
                replica.manifests,
                replica_name=replica.name,
                partial=partial,
            )
            plan = make_plan(layout.manifests, replica.manifests)
            nbytes = sum([plan.nbytes(*pair) for pair in plan.pairs])
            replica.plans.put(key, (plan, nbytes))
        return replica.plans[key]

    def _nobody(self) -> str:
        joining = [replica.name for replica in self._members.replicas.values()]
        names = f"; still joining: {', '.join(joining)}" if joining else ""
        return f"no replica has joined (wait_for_replicas waits for them){names}"

    def _check_verified(self, round_: Round) -> None:
        equal: set[int] = set()
        for rank, answer in sorted(round_.verified.items()):
            if answer.fault is not None:
                raise answer.fault.error(f"trainer rank {rank}: ")
            equal.update(answer.equal)
        for index, (first, second) in enumerate(round_.pairs):
            if index not in equal:
                message = (
                    f"{first!r} and {second!r} share one storage on the generator, but "
                    "no trainer rank holds both, so their values cannot be compared"
                )
                raise PlanError(message)
        self._begin(round_)

    # Moving

    def _begin(self, round_: Round) -> None:
        round_.begun = True
        round_.started = time.monotonic()
        skip = round_.requests[0].on_busy == "skip"
        for transfer in list(round_.transfers.values()):
            if transfer.replica.gone:
                self._report(round_, transfer, "skipped", "it left", removed=True)
            elif transfer.replica.credit is not None:
                self._move(round_, transfer)
            elif skip:
                reason = "busy: the version before is not switched in yet"
                self._report(round_, transfer, "skipped", reason)

    def _move(self, round_: Round, transfer: Transfer) -> None:
        replica, layout = transfer.replica, round_.layout
        if not round_.begun or layout is None or replica.credit is None:
            return
        slot, replica.credit = replica.credit, None
        replica.sequence += 1
        transfer.sequence = replica.sequence
        self._members.tell_layout(replica, layout)
        plan = transfer.plan.digest
        replica.peer.post(Expect(replica.sequence, round_.version, layout.digest, plan))
        put = Put(
            push=round_.push,
            link=replica.link,
            sequence=replica.sequence,
            slot=slot,
            version=round_.version,
            layout=layout.digest,
            plan=plan,
        )
        self._members.tell_trainers(put)

    def _expire(self, round_: Round) -> None:
        if round_.outcome is not None:
            return
        seconds = min(request.timeout for request in round_.requests.values())
        absent = sorted(set(range(self._members.world_size)) - set(round_.requests))
        if absent:
            ranks = ", ".join(str(rank) for rank in absent)
            what = f"trainer rank {ranks} did not call push"
        else:
            what = "the trainer ranks did not compare tied tensors"
        error = TimedOutError(f"{round_.what} timed out after {seconds} s: {what}")
        if not round_.begun:
            self._end(round_, error=error)
            return
        for transfer in list(round_.transfers.values()):
            self._expire_transfer(round_, transfer, seconds)

    def _expire_transfer(
        self, round_: Round, transfer: Transfer, seconds: float
    ) -> None:
        if transfer.report is not None:
            return
        if transfer.sequence is None:
            reason = f"timed out: it opened no slot within {seconds} s (busy or stuck)"
            self._report(round_, transfer, "failed", reason)
        elif len(transfer.ended) == self._members.world_size:
            reason = f"timed out: it did not confirm the version within {seconds} s"
            self._members.drop(transfer.replica, reason)
        else:
            self._stop(round_, transfer, f"timed out: not all was put in {seconds} s")

    def _give_up(self, round_: Round, error: WeightSyncError) -> None:
        round_.fault = error
        if not round_.begun:
            self._end(round_, error=error)
            return
        for transfer in list(round_.transfers.values()):
            if transfer.report is not None:
                continue
            if transfer.sequence is None:
                self._report(round_, transfer, "failed", str(error))
            else:
                self._stop(round_, transfer, str(error))

    def _stop(self, round_: Round, transfer: Transfer, reason: str) -> None:
        if transfer.stopping is not None or transfer.sequence is None:
            return
        transfer.stopping = reason
        self._members.tell_trainers(Stop(transfer.replica.link, transfer.sequence))

        def expire() -> None:
            if transfer.report is None:
                why = f"{reason}; giving it up took longer than {STOP_SECONDS} s"
                self._members.drop(transfer.replica, why)

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
        reports = {
            t.replica.name: t.report
            for t in round_.transfers.values()
            if t.report is not None
        }
        if len(reports) < len(round_.transfers) or round_.outcome is not None:
            return
        nbytes = sum(
            [
                t.nbytes
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
