"""What the tests gave: recorded case by case, counted for each test and backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Outcome = Literal["lacking", "pending", "passed", "differs", "failed"]
"""Of a case: the backend lacks what the module needs; it was not run; it did what is
promised; it did what a known fault of the backend is; it did something else."""

LACKING: Final = "not yet"
NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class Case:
    """A test with one set of parameters, for one backend.

    ``name`` has the identifiers of the other parameters, ``reasons`` are those of the
    faults that it is to show.
    """

    module: str
    test: str
    backend: str
    name: str = ""
    reasons: tuple[str, ...] = ()
    outcome: Outcome = "pending"


@dataclass(frozen=True, slots=True)
class Record:
    """The cases of a run, with one minor version of torch."""

    torch: str
    cases: dict[str, Case] = field(default_factory=dict)
    """By the identifiers that pytest gives them."""

    def ended(self, identifier: str, outcome: Literal["passed", "failed"]) -> None:
        """Note how a phase of a case ended; whatever failed stays so."""
        case = self.cases[identifier]
        if case.outcome != "failed":
            passed: Outcome = "differs" if case.reasons else "passed"
            found = passed if outcome == "passed" else outcome
            self.cases[identifier] = replace(case, outcome=found)

    def counts(self, backends: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
        """Return the counts by module and test, and by backend.

        Those of which a case was not run, or failed, are left out.
        """
        tests: dict[tuple[str, str], list[Case]] = {}
        for case in self.cases.values():
            tests.setdefault((case.module, case.test), []).append(case)
        return {
            test: {
                backend: count(outcomes)
                for backend in backends
                for outcomes in [[it.outcome for it in cases if it.backend == backend]]
                if not {"pending", "failed"} & set(outcomes)
            }
            for test, cases in tests.items()
        }


def count(outcomes: list[Outcome]) -> str:
    """Return how many of these passed, as the table shows it."""
    passed, every = outcomes.count("passed"), len(outcomes)
    if "lacking" in outcomes:
        return LACKING
    if not every:
        return NONE
    return f"{every}" if passed == every else f"{passed} of {every}"
