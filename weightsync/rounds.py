"""What the leader knows of one push: the round, and its transfers to the replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from weightsync.errors import PeerError, WeightSyncError
from weightsync.messages import Fault
from weightsync.stats import PushReport

if TYPE_CHECKING:
    from anyio import CancelScope

    from weightsync.alike import Alike
    from weightsync.fit import Fit
    from weightsync.messages import (
        Layout,
        PushEnded,
        PushRequest,
        PutEnded,
        Terms,
        Verified,
    )
    from weightsync.replica import Replica
    from weightsync.stats import ReplicaReport


class Transfer:
    """A round's way to one replica: waiting, moving, stopping, or reported."""

    def __init__(self, replica: Replica, fit: Fit) -> None:
        self.replica: Final = replica
        self.fit: Final = fit
        self.sequence: int | None = None
        self.ended: dict[int, PutEnded] = {}
        self.stopping: WeightSyncError | None = None
        self.report: ReplicaReport | None = None
        self.error: WeightSyncError | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for plans or for credit."""
        return self.sequence is None and self.report is None

    def is_stopping(self, sequence: int) -> bool:
        """Whether it is this transfer, given up and not reported yet."""
        given_up = self.stopping is not None and self.report is None
        return given_up and self.sequence == sequence

    @property
    def number(self) -> int:
        """Its sequence; 0 before it moves."""
        return self.sequence or 0

    def has_signals(self, world_size: int) -> bool:
        """Whether all trainer ranks have ended, and said what they sent."""
        ranks = len(self.replica.manifests)
        said = [len(ended.signals) == ranks for ended in self.ended.values()]
        return len(said) == world_size and all(said)

    @property
    def signals(self) -> tuple[tuple[int, ...], ...]:
        """What all trainer ranks sent, by rank of the replica, when all have ended."""
        return tuple(
            tuple(self.ended[rank].signals[generator] for rank in sorted(self.ended))
            for generator in range(len(self.replica.manifests))
        )

    @property
    def moving(self) -> bool:
        """Whether bytes may be on their way."""
        return self.sequence is not None and self.report is None

    def fault_of(self, ended: PutEnded) -> Fault | None:
        """Why a trainer rank cannot say how many signals it sent, if it cannot."""
        if ended.fault is None and len(ended.signals) != len(self.replica.manifests):
            return Fault("PeerError", "its end of the link is gone")
        return ended.fault


class Round:
    """One push of all trainer ranks."""

    def __init__(self, push: int) -> None:
        self.push: Final = push
        self.requests: dict[int, PushRequest] = {}
        self.verified: dict[int, Verified] = {}
        self.alike: tuple[Alike, ...] = ()
        self.layout: Layout | None = None
        self.version = -1
        self.epoch = 0
        self.transfers: dict[int, Transfer] = {}
        self.begun = False
        self.started = 0.0
        self.deadline = math.inf
        self.fault: WeightSyncError | None = None
        self.ending = False
        self.outcome: PushEnded | None = None
        self.answered: set[int] = set()
        self.timers: list[CancelScope] = []

    @property
    def terms(self) -> Terms:
        """What all ranks called it with, once that is checked."""
        return self.requests[0].terms

    @property
    def waits(self) -> bool:
        """Whether a transfer is not reported yet."""
        return any(transfer.report is None for transfer in self.transfers.values())

    def awaited(self, world_size: int) -> str:
        """Say which trainer ranks did not do what it waits for before it begins."""
        ranks = set(range(world_size))
        absent, what = ranks - set(self.requests), "call push"
        if not absent:
            absent, what = ranks - set(self.verified), "compare its tensors"
        who = ", ".join(str(rank) for rank in sorted(absent))
        return f"trainer rank {who} did not {what}"

    def report(self, seconds: float) -> PushReport:
        """Say what became of all transfers that are reported."""
        nbytes, reports = 0, {}
        for transfer in self.transfers.values():
            if transfer.report is not None:
                reports[transfer.replica.name] = transfer.report
                if transfer.report.status == "delivered":
                    nbytes += transfer.fit.nbytes
        return PushReport(self.version, nbytes, seconds, reports, self.epoch)

    @property
    def what(self) -> str:
        """What messages call it."""
        called = [request.terms.version for request in self.requests.values()]
        given = [version for version in called if version is not None]
        version = self.version if self.version >= 0 else given[0] if given else None
        return f"push {self.push}" if version is None else f"push of version {version}"


def failure(round_: Round, report: PushReport) -> WeightSyncError | None:
    """The error that a report amounts to under the caller's ``require``.

    It is of the kind that all transfers failed with, PeerError where they differ.
    """
    failed = report.failed
    if not failed or (round_.terms.require == "any" and report.delivered):
        return None
    reasons = "; ".join(f"replica {name!r}: {why}" for name, why in failed.items())
    message = f"push of version {report.version} failed: {reasons}"
    errors = [transfer.error for transfer in round_.transfers.values()]
    kinds = {type(error) for error in errors if error is not None}
    return (kinds.pop() if len(kinds) == 1 else PeerError)(message)
