"""A scheduler outside of the job, which says who may be in the pool."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.chaos.words import GRACE, OPEN_SECONDS

if TYPE_CHECKING:
    from tests.chaos.cast import Job, Process
    from tests.chaos.stage import Stage

Names = frozenset[str] | None
"""Those of the pool; None for everybody."""


class Scheduler:
    """Proposes through a trainer rank, and once more to trainers that start again.

    It proposes one thing after the other. Where it is not ``at_work`` nobody proposes
    anything, and everybody is admitted.
    """

    def __init__(self, stage: Stage, *, at_work: bool) -> None:
        self._stage = stage
        self._at_work = at_work
        self._names: Names = frozenset() if at_work else None
        self._rank = 0
        self._job: Job | None = None
        self._untold: deque[Names] = deque()
        self._asked: Process | None = None
        self._answers = 0

    def admits(self, name: str) -> bool:
        """Whether a replica of this name is to be in the pool."""
        return self._names is None or name in self._names

    def decide(self, names: tuple[str, ...] | None, rank: int) -> None:
        """Let these be the pool, by the word of a trainer rank, and all if None."""
        self._names = None if names is None else frozenset(names)
        self._rank = rank
        self._untold.append(self._names)
        self.propose_if_due()

    def propose_if_due(self) -> None:
        """Say what the job has not been told yet, if it can hear it."""
        job = self._stage.job
        if not self._at_work or job is None or not job.opened or self._waits:
            return
        if self._job is not job:
            self._job = job
            self._untold = deque([self._names])
        if self._untold:
            names = self._untold.popleft()
            self._asked = job.ranks[self._rank % len(job.ranks)]
            self._answers = self._asked.count("propose")
            self._asked.say(
                ("propose", None if names is None else tuple(sorted(names)))
            )

    def settle(self) -> None:
        """Return when everything is proposed, or nobody is there to hear it."""
        limit = OPEN_SECONDS + GRACE
        self._stage.must(lambda: self._settled, limit, "answer a proposal")

    @property
    def _settled(self) -> bool:
        job = self._stage.job
        if not self._at_work or job is None:
            return True
        return self._job is job and not self._untold and not self._waits

    @property
    def _waits(self) -> bool:
        """Whether a proposal is not answered, and the job still there."""
        asked, job = self._asked, self._job
        if asked is None or job is None or job.victim is not None:
            return False
        return asked.alive and asked.count("propose") == self._answers
