"""What the leader knows of one push: the round, and its transfers to the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weightsync.errors import PeerError, TimedOutError, WeightSyncError

if TYPE_CHECKING:
    from anyio import CancelScope

    from weightsync.messages import Layout, PushEnded, PushRequest, PutEnded, Verified
    from weightsync.plan import Plan
    from weightsync.pool import Replica
    from weightsync.stats import PushReport, ReplicaReport


class Transfer:
    """A round's way to one replica: waiting, moving, stopping, or reported."""

    def __init__(self, replica: Replica, plan: Plan, nbytes: int) -> None:
        self.replica: Final = replica
        self.plan: Final = plan
        self.nbytes: Final = nbytes
        self.sequence: int | None = None
        self.ended: dict[int, PutEnded] = {}
        self.stopping: str | None = None
        self.report: ReplicaReport | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for credit."""
        return self.sequence is None and self.report is None

    def is_stopping(self, sequence: int) -> bool:
        """Whether it is this transfer, given up and not reported yet."""
        given_up = self.stopping is not None and self.report is None
        return given_up and self.sequence == sequence

    @property
    def moving(self) -> bool:
        """Whether bytes may be on their way."""
        return self.sequence is not None and self.report is None


class Round:
    """One push of all trainer ranks."""

    def __init__(self, push: int) -> None:
        self.push: Final = push
        self.requests: dict[int, PushRequest] = {}
        self.verified: dict[int, Verified] = {}
        self.pairs: tuple[tuple[str, str], ...] = ()
        self.layout: Layout | None = None
        self.version = -1
        self.transfers: dict[int, Transfer] = {}
        self.begun = False
        self.started = 0.0
        self.fault: WeightSyncError | None = None
        self.outcome: PushEnded | None = None
        self.answered: set[int] = set()
        self.timers: list[CancelScope] = []

    @property
    def what(self) -> str:
        """What messages call it."""
        given = [r.version for r in self.requests.values() if r.version is not None]
        version = self.version if self.version >= 0 else given[0] if given else None
        return f"push {self.push}" if version is None else f"push of version {version}"


def failure(round_: Round, report: PushReport) -> WeightSyncError | None:
    """The error that a report amounts to under the caller's ``require``."""
    failed = report.failed
    if not failed or (round_.requests[0].require == "any" and report.delivered):
        return None
    reasons = "; ".join(f"replica {name!r}: {why}" for name, why in failed.items())
    message = f"push of version {report.version} failed: {reasons}"
    if all(reason.startswith("timed out") for reason in failed.values()):
        return TimedOutError(message)
    return PeerError(message)
