"""The exception tree: one root, one class for each kind of fault.

A message says what was asked, what was found, and which rank, replica, tensor and
version it concerns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weightsync.stats import PushReport


class WeightSyncError(Exception):
    """Root of everything that this library raises on purpose.

    ``report`` says what became of each replica, where a push failed after it had begun.
    """

    report: PushReport | None = None


class ClosedError(WeightSyncError, RuntimeError):
    """The object was closed on this side, or belongs to the parent of a fork."""


class PeerError(WeightSyncError):
    """The other side failed: it died, refused, or left in the middle."""


class FencedError(PeerError):
    """Other trainers have taken over the job: these ones can reach nobody any more."""


class TimedOutError(WeightSyncError, TimeoutError):
    """The time given was over before the operation was."""


class PlanError(WeightSyncError, ValueError):
    """What was given does not fit: names, shapes, dtypes, values, versions."""


class OtherStartError(PlanError):
    """Refused by what may be left of a former start; its own rank 0 may still come."""


class DtypeError(PlanError, TypeError):
    """A dtype differs, or a value is not a tensor that can be moved as bytes."""


class EpochError(WeightSyncError, RuntimeError):
    """Memory was asked for in the wrong epoch: read while exposed, or the reverse."""


class ProtocolError(WeightSyncError):
    """A message from the wire or the store was not one of ours."""


class UnsupportedError(WeightSyncError, NotImplementedError):
    """This torch, NCCL, device or platform cannot do what was asked."""


class RemoteFault:
    """Carries an error over the wire as its class name and its message."""

    _classes: ClassVar[dict[str, type[WeightSyncError]]] = {
        kind.__name__: kind
        for kind in (
            WeightSyncError,
            ClosedError,
            PeerError,
            FencedError,
            TimedOutError,
            PlanError,
            OtherStartError,
            DtypeError,
            EpochError,
            ProtocolError,
            UnsupportedError,
        )
    }

    @classmethod
    def encode(cls, error: BaseException) -> tuple[str, str]:
        """Name the class nearest to ``error`` that the other side also knows."""
        for kind in type(error).__mro__:
            if cls._classes.get(kind.__name__) is kind:
                return kind.__name__, str(error)
        return PeerError.__name__, f"{type(error).__name__}: {error}"

    @classmethod
    def decode(cls, kind: str, message: str) -> WeightSyncError:
        """Build the error that ``encode`` was given; unknown names give a PeerError."""
        return cls._classes.get(kind, PeerError)(message)
