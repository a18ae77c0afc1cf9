"""A plan of one link with what is derived from it once, and the windows it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weightsync.epoch import Mode
from weightsync.segments import uncrossed
from weightsync.slots import Header, Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.engine import Engine
    from weightsync.messages import Expect, FormLink, Put
    from weightsync.plan import Plan
    from weightsync.runs import Run
    from weightsync.sending import Parcel


def slots_of(form: FormLink) -> list[Slots]:
    """Return the layouts of the windows of all ranks of the replica."""
    mode, segments = Mode(form.mode), dict(enumerate(form.segments))
    return [
        Slots.of(mode, manifest, segments.get(rank, 0))
        for rank, manifest in enumerate(form.manifests)
    ]


class Prepared:
    """A plan, and what is derived from it once: totals, and what to put into a slot.

    ``slots`` are those of each rank of the replica.
    """

    def __init__(self, plan: Plan, engine: Engine, slots: Sequence[Slots]) -> None:
        self.plan: Final = plan
        self._slots: Final = slots
        self.parcels: dict[int, dict[int, Parcel]] = {}
        self._engine: Final = engine
        self._totals: dict[tuple[int, int], tuple[int, int]] = {}
        self._puts: dict[tuple[int, int], int] = {}

    def totals(self, trainer: int, generator: int) -> tuple[int, int]:
        """Rows and bytes from one rank to another; (0, 0) where nothing moves."""
        pair = (trainer, generator)
        if pair not in self._totals:
            self._totals[pair] = self.plan.rows(*pair), self.plan.nbytes(*pair)
        return self._totals[pair]

    def runs(self, trainer: int, generator: int) -> Sequence[Run]:
        """Return what is put as it is, cut where a segment ends."""
        runs, cuts = self.plan.runs(trainer, generator), self._slots[generator].cuts
        return list(uncrossed(runs, cuts)) if cuts else runs

    def signals(self, trainer: int, generator: int) -> int:
        """Signals of one push: one a put and one for the header, if anything moves."""
        pair = (trainer, generator)
        if pair not in self._puts:
            casts = [cast.run for cast in self.plan.casts(*pair)]
            puts = self._engine.puts([*self.runs(*pair), *casts])
            self._puts[pair] = puts + 1 if puts else 0
        return self._puts[pair]

    def header(self, head: Put | Expect, trainer: int, generator: int) -> Header:
        """The header that a trainer rank puts last."""
        rows, nbytes = self.totals(trainer, generator)
        digest = self.plan.digests[trainer, generator]
        return Header(head.version, head.sequence, rows, nbytes, digest)
