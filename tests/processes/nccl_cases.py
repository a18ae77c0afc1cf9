"""The calls of NCCL that links and pushes make, and cases in which one goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from tests.processes.driven import Held, ask, call
from tests.processes.faulty import TRAINERS

if TYPE_CHECKING:
    from tests.processes.faulty import Pool


LOGS: Final = {
    "trainer": f"trainer-{TRAINERS - 1}",
    "leader": "trainer-0",
    "generator": "gen-1",
}


USUAL: Final = "2.30.7"
NCCLS: Final = (USUAL, "2.31.2", "2.32.3")
"""Versions of NCCL that the engine takes."""


@dataclass(frozen=True)
class Case:
    """The faults of the last trainer rank, of the first, or of replica "gen-1"."""

    who: str
    faults: str
    nccl: str = USUAL
    """On which it is, where the test is not on each."""

    def __str__(self) -> str:
        version = "" if self.nccl == USUAL else f", NCCL {self.nccl}"
        return f"{self.who}: {self.faults}{version}"

    @property
    def log(self) -> str:
        """Whose log tells of the fault."""
        return LOGS[self.who]

    @property
    def function(self) -> str:
        """The function or operation that fails."""
        return self.faults.partition("@")[0]

    def of(self, who: str) -> str:
        """The faults of one of the two."""
        return self.faults if self.who == who else ""


def parameters(cases: list[Case], *quick: str) -> list[object]:
    """All cases; those that the CI does not run are slow."""
    unknown = set(quick) - set(map(str, cases))
    assert not unknown, unknown
    return [
        pytest.param(
            case,
            id=str(case),
            marks=() if str(case) in quick else pytest.mark.slow,
        )
        for case in cases
    ]


TRAINER_LINK: Final = {
    "init": 1,
    "mem_alloc": 1,
    "all_gather": 2,
    "window_register": 1,
    "signal": 1,
    "wait": 1,
}
"""Calls of a trainer rank for one link; the first one allocates the staging memory."""

GENERATOR_LINK: Final = {**TRAINER_LINK, "mem_alloc": 2}


ERROR: Final = "fail=3"


def numbered(calls: dict[str, int], before: dict[str, int]) -> list[tuple[str, int]]:
    """Each call by name and occurrence, after so many of each."""
    return [
        (name, before.get(name, 0) + number + 1)
        for name, count in calls.items()
        for number in range(count)
    ]


OF_TRAINER: Final = numbered(TRAINER_LINK, {**TRAINER_LINK, "mem_alloc": 2})
OF_GENERATOR: Final = numbered(GENERATOR_LINK, {})
CALLS: Final = [("trainer", *call) for call in OF_TRAINER] + [
    ("generator", *call) for call in OF_GENERATOR
]


def lost(pool: Pool, name: str) -> Held:
    """What a replica holds when it has heard that its trainers are gone."""
    while (outcome := call(pool.replicas[name], "receive", timeout=15)).kind == "ok":
        version = outcome.value.version
        assert Held(version, version) == call(pool.replicas[name], "held").value
    assert "PeerError" == outcome.kind, outcome
    held: Held = call(pool.replicas[name], "held").value
    return held


def restart(pool: Pool, version: int) -> None:
    """Other trainers come, and all replicas that are left get their first push."""
    pool.close_trainers()
    pool.train()
    for name in pool.replicas:
        ask(pool.replicas[name], "receive", timeout=15)
    pool.joined(len(pool.replicas))
    pool.begin(version)
    outcomes = pool.pushed()
    held = [pool.received(name)[1] for name in pool.replicas]

    assert ["ok", "ok"] == [each.kind for each in outcomes], outcomes
    assert [Held(version, version)] * len(held) == held
