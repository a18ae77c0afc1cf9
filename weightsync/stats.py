"""What pushes and receives report: plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["delivered", "skipped", "failed"]


class ReplicaReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a push did to one replica.

    ``delivered``: every rank of it holds the whole version. ``skipped``: it was busy,
    or left; it keeps its version. ``failed``: see ``reason``; it keeps its version too.
    ``removed``: it is no longer in the pool.
    """

    status: Status
    reason: str = ""
    removed: bool = False
    seconds: float = 0.0


class PushReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of one push, the same on every trainer rank.

    ``nbytes`` were put in total, to all replicas that it was delivered to; ``seconds``
    from the moment all trainer ranks had called ``push``. ``epoch`` is that in which
    the version is counted; see ``Trainer``.
    """

    version: int
    nbytes: int
    seconds: float
    replicas: dict[str, ReplicaReport]
    epoch: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def delivered(self) -> tuple[str, ...]:
        """Names of the replicas that hold the version."""
        return self._having("delivered")

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the replicas that were busy or left."""
        return self._having("skipped")

    @property
    def failed(self) -> dict[str, str]:
        """Names of the replicas that failed, with the reasons."""
        return {name: self.replicas[name].reason for name in self._having("failed")}

    def _having(self, status: Status) -> tuple[str, ...]:
        return tuple(
            name for name, report in self.replicas.items() if report.status == status
        )


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version that a generator received.

    ``nbytes`` arrived for this rank; ``waited`` seconds passed in ``receive`` until the
    version was whole and no lease was held, ``switched`` seconds in the switch itself.
    ``epoch`` is that in which the version is counted; see ``Trainer``.
    """

    version: int
    nbytes: int
    waited: float
    switched: float
    epoch: int = 0
