"""Which version is the next, in which epoch: versions never go back unnoticed. Pure."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from weightsync.errors import PlanError

LARGEST: Final = 2**62
"""Limit of epochs and versions, far from what a counter reaches."""


class Held(NamedTuple):
    """A version, and the epoch in which it is counted; a later epoch is higher."""

    epoch: Annotated[int, Meta(ge=0, le=LARGEST)]
    version: Annotated[int, Meta(ge=0, le=LARGEST)]


class Counting:
    """The versions of a job, as its leader counts them.

    The floor is the highest that any replica was delivered, or held when it joined.
    ``epoch`` begins a count of its own; without one the floor says which epoch it is.
    """

    def __init__(self, epoch: int | None = None) -> None:
        self.floor = Held(0 if epoch is None else epoch, 0)
        self._given: Final = epoch
        self._holder = ""

    def __repr__(self) -> str:
        """Show the floor."""
        return f"<Counting, version {self.floor.version} of epoch {self.floor.epoch}>"

    def joined(self, replica: str, held: Held | None) -> None:
        """Count on from what a replica holds.

        Raises PlanError where that is of a later epoch than the trainers'.
        """
        if held is None or held <= self.floor:
            return
        if self._given is not None and held.epoch > self._given:
            message = (
                f"replica {replica!r} holds version {held.version} of epoch "
                f"{held.epoch}, later than epoch {self._given} of the trainers; start "
                f"them with epoch={held.epoch} to go on in it, or a higher one"
            )
            raise PlanError(message)
        self.floor, self._holder = held, replica

    def delivered(self, held: Held) -> None:
        """A replica holds this version now."""
        if held > self.floor:
            self.floor, self._holder = held, ""

    def next(self, version: int | None) -> Held:
        """Return the version to push: the one that is asked for, or the next.

        Raises PlanError where it is not above the floor.
        """
        epoch, last = self.floor
        version = last + 1 if version is None else version
        if version > last:
            return Held(epoch, version)
        message = f"version {version} does not increase: version {last} was delivered "
        if not self._holder:
            raise PlanError(f"{message}before")
        message = (
            f"version {version} does not increase: replica {self._holder!r} held "
            f"version {last} of epoch {epoch} when it joined; push a version above it, "
            f"or start the trainers with epoch={epoch + 1} to count anew"
        )
        raise PlanError(message)


def check_epoch(epoch: int | None) -> int | None:
    """Return an epoch that was given; PlanError where it is none."""
    if epoch is not None and not 0 <= epoch <= LARGEST:
        raise PlanError(f"an epoch is a number from 0 to 2**62, not {epoch}")
    return epoch
