"""Case ``backend``: what issuing an operation costs, beside torch's own ``nccl2``.

Two ranks on emulated GPUs, both backends in the same processes, batch by batch in turn.
Seconds of the host from the call until it returns; no figure is one of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightsync import testing
from weightsync.bench.backend_ranks import BATCH, CALLS, OURS, RANKS, THEIRS, measure
from weightsync.bench.results import BackendResult, BackendRow, Spread
from weightsync.bench.units import parse_count

if TYPE_CHECKING:
    import argparse

DESCRIPTION: Final = """\
What it costs the host to issue a small operation, by weightsync-nccl2 and by torch's
own nccl2: between two ranks on emulated GPUs, both in the same processes and in turn.
These are figures of the host's side of the calls, not of any GPU."""

ASKED: Final = 1.0


@dataclass(frozen=True, slots=True)
class BackendCase:
    """What to measure: how many batches of each."""

    batches: int = 100

    @property
    def ranks(self) -> int:
        """How many processes there are at once."""
        return RANKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--batches",
        type=parse_count,
        default=BackendCase().batches,
        metavar="N",
        help=f"batches of {BATCH} operations of each kind (default: %(default)s)",
    )
    parser.set_defaults(make=_case)


def _case(found: argparse.Namespace) -> list[Any]:
    if found.plot is not None:
        raise ValueError("--plot draws nothing of the backend")
    return [BackendCase(found.batches)]


def run(case: BackendCase) -> BackendResult:
    """Measure; raise VerificationError, or UnsupportedError without an emulator."""
    found = testing.emulated(measure, RANKS, args=[case.batches], timeout=300)
    seconds = found[0][1]
    rows = [
        _row(name, seconds[f"{OURS} {name}"], seconds[f"{THEIRS} {name}"])
        for name in CALLS
    ]
    verified = sum(verified for verified, _ in found)
    return BackendResult({"batches": case.batches}, verified, rows)


def _row(name: str, ours: list[float], theirs: list[float]) -> BackendRow:
    mine, other = Spread.of(ours), Spread.of(theirs)
    ratio = mine.p50 / other.p50
    return BackendRow(
        name=name,
        ours=mine,
        theirs=other,
        ratio=ratio,
        best_ratio=min(ours) / min(theirs),
        asked=ASKED,
        met=ratio <= ASKED,
    )
