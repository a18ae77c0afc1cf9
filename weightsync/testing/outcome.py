"""What became of a rank."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Final

from weightsync.errors import WeightSyncError
from weightsync.testing.environment import HANG_EXIT_CODE

BEGINNING: Final = 8000
END: Final = 16000
"""How much of a rank's output a message shows; all of it is in the outcome."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the process of one rank ended.

    ``exit_code`` is that of the process, negative for a signal. ``result`` is what the
    function returned, as msgpack gives it back (a tuple is a list then); None where it
    returned nothing or did not return. ``output`` is what the rank wrote on standard
    output and standard error. ``late`` ranks were killed by us, because the time was
    over or another rank had failed.
    """

    rank: int
    exit_code: int
    result: Any
    output: str
    late: bool = False

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended well."""
        return self.exit_code == 0

    @property
    def hung(self) -> bool:
        """Whether the emulator diagnosed a hang: the report is in ``output``."""
        return self.exit_code == HANG_EXIT_CODE

    def describe(self) -> str:
        """Say how it ended, in words."""
        if self.late:
            return "was still running when the time was over, and was killed"
        if self.hung:
            return (
                f"hung, which the emulator diagnosed (exit code {HANG_EXIT_CODE}): its "
                f"report is below"
            )
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            return f"was ended by {name} (exit code {self.exit_code})"
        return f"ended with exit code {self.exit_code}"


class RanksFailedError(WeightSyncError):
    """A rank on the emulator failed, or did not end in time.

    ``outcomes`` are those of all ranks.
    """

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def check(function: str, outcomes: list[Outcome]) -> None:
    """Raise RanksFailedError, with what every rank wrote, unless all ended well."""
    failed = [each for each in outcomes if not each.ok]
    if not failed:
        return
    lines = [
        f"{function} on the emulator: {len(failed)} of {len(outcomes)} ranks failed"
    ]
    lines += [f"rank {each.rank} {each.describe()}" for each in outcomes]
    for each in outcomes:
        lines.append(f"--- output of rank {each.rank}")
        lines.append(_shortened(each.output.rstrip()) or "(nothing)")
    raise RanksFailedError("\n".join(lines), outcomes)


def _shortened(text: str) -> str:
    left = len(text) - BEGINNING - END
    if left <= 0:
        return text
    return f"{text[:BEGINNING]}\n... ({left} characters) ...\n{text[-END:]}"
