"""Who comes under a name that another replica has, until it is known who of them is in.

A replica that died is not out before its end was read, and one whose host has vanished
not before its lease is over. So the owner of a name is asked whether it is there: what
it said before it died is no answer to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from weightsync.elastic import RollCall
from weightsync.errors import PlanError
from weightsync.messages import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.replica import Replica


class Heir(NamedTuple):
    """A replica that waits for the answer of an owner to the roll call of a number."""

    number: int
    owner: Replica
    replica: Replica


class Succession:
    """Replicas that wait for a name; they are not in the pool, and may never be.

    ``arrive`` is called again for who waited, where the name is free; it may raise
    PlanError.
    """

    def __init__(self, arrive: Callable[[Replica], None]) -> None:
        self._arrive: Final = arrive
        self._calls = 0
        self._heirs: list[Heir] = []

    def wait(self, replica: Replica, owner: Replica) -> None:
        """Let a replica wait until the owner of its name answers, or is out."""
        self._calls += 1
        self._heirs.append(Heir(self._calls, owner, replica))
        owner.peer.post(RollCall(self._calls))

    def present(self, owner: Replica, number: int | None = None) -> None:
        """An owner answers a roll call, or comes again: it has its name."""
        for heir in self._waiting_for(owner):
            if number is None or heir.number <= number:
                self._heirs.remove(heir)
                message = f"there is a replica {owner.name!r} in the pool already"
                heir.replica.end(Fault.of(PlanError(message)))

    def out(self, owner: Replica) -> None:
        """An owner is out of the pool: let those come who wait for it."""
        for heir in self._waiting_for(owner):
            self._heirs.remove(heir)
            try:
                self._arrive(heir.replica)
            except PlanError as error:
                heir.replica.end(Fault.of(error))

    def leaves(self, replica: Replica) -> bool:
        """Forget a replica that is gone itself; return whether it waited."""
        waiting = [heir for heir in self._heirs if heir.replica is replica]
        for heir in waiting:
            self._heirs.remove(heir)
            replica.gone = True
        return bool(waiting)

    def end(self, fault: Fault | None) -> None:
        """There is no pool any more."""
        for heir in self._heirs:
            heir.replica.end(fault)
        self._heirs.clear()

    def _waiting_for(self, owner: Replica) -> list[Heir]:
        return [heir for heir in self._heirs if heir.owner is owner]


class Attendance:
    """What a hub knows of the last roll call that each of its ranks has answered."""

    def __init__(self, world_size: int) -> None:
        self._world_size: Final = world_size
        self._present: dict[int, int] = {}
        self._answered = 0

    def present(self, rank: int, number: int) -> int | None:
        """Return the number of a roll call that all have answered by now, once."""
        self._present[rank] = number
        answered = min(self._present.values())
        if len(self._present) < self._world_size or answered == self._answered:
            return None
        self._answered = answered
        return answered
