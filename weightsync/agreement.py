"""Whether both sides of a link plan the same: asked once for each layout.

Every rank plans its own pairs. The digests of all pairs are added up on either side, so
the sums are equal unless somebody plans something else. No byte moves before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weightsync.messages import Agree, Agreed, Fault
from weightsync.plan import sum_of_digests
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from weightsync.link import Link

_NONE: Final = bytes(16)


class Agreement:
    """What the ranks of a link have answered to one ``Agree``."""

    def __init__(self, number: int, trainers: int) -> None:
        self.number: Final = number
        self._missing: set[int | None] = {*range(trainers), None}
        self._trainers = _NONE
        self._replica = _NONE

    def answer(self, rank: int | None, digest: bytes) -> None:
        """Take the digest of a trainer rank, or of all ranks of the replica (None)."""
        if rank not in self._missing:
            return
        self._missing.remove(rank)
        if not self._missing:
            self._missing = set()  # a set keeps the memory of what it had
        if rank is None:
            self._replica = digest
        else:
            self._trainers = sum_of_digests((self._trainers, digest))

    @property
    def complete(self) -> bool:
        """Whether everybody has answered."""
        return not self._missing

    @property
    def difference(self) -> str | None:
        """What to say where the sides plan differently."""
        if not self.complete or self._trainers == self._replica:
            return None
        return (
            f"its plan differs from that of the trainers: {self._replica.hex()}, not "
            f"{self._trainers.hex()}"
        )

    @property
    def replica_is_missing(self) -> bool:
        """Whether the replica has not answered."""
        return None in self._missing

    @property
    def awaited(self) -> str:
        """Who has not answered."""
        ranks = sorted(rank for rank in self._missing if rank is not None)
        who = [f"trainer rank {', '.join(map(str, ranks))}"] if ranks else []
        return " and ".join([*who, "the replica"] if None in self._missing else who)


async def planned(link: Link, agree: Agree) -> Agreed:
    """Plan this rank's part of a layout, beside the loop, and answer the leader."""
    try:
        prepared = await in_thread(link.plan, agree.layout)
    except Exception as error:  # noqa: BLE001 -- the leader hears it and names it.
        return Agreed(agree.link, agree.number, _NONE, Fault.of(error))
    return Agreed(agree.link, agree.number, prepared.plan.digest)
