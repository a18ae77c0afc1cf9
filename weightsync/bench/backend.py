"""Case ``backend``: what issuing an operation costs, beside torch's own ``nccl2``.

Two ranks on emulated GPUs, both backends in the same processes, batch by batch in turn.
Seconds of the host from the call until it returns; no figure is one of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from weightsync import testing
from weightsync.bench.backend_calls import BATCH, KINDS
from weightsync.bench.backend_ranks import OURS, RANKS, THEIRS, measure
from weightsync.bench.results import BackendResult, BackendRow, Spread
from weightsync.bench.units import parse_count

if TYPE_CHECKING:
    import argparse

DESCRIPTION: Final = """\
What it costs the host to issue a small operation, by weightsync-nccl2 and by torch's
own nccl2: collectives, puts and waits between two ranks on emulated GPUs, both backends
in the same processes and in turn. These are figures of the host's side of the calls,
not of any GPU. The flight recorder is on; WEIGHTSYNC_TRACE_BUFFER=0 turns ours off."""

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
        for name in KINDS
    ]
    verified = sum(verified for verified, _ in found)
    return BackendResult({"batches": case.batches}, verified, rows)


def _row(name: str, ours: list[list[float]], theirs: list[list[float]]) -> BackendRow:
    mine, other = (Spread.of(list(chain(*side))) for side in (ours, theirs))
    best, best_other = (min(chain(*side)) for side in (ours, theirs))
    ratio = mine.p50 / other.p50
    low, high = _range(
        [median(a) / median(b) for a, b in zip(ours, theirs, strict=True)]
    )
    return BackendRow(
        name=name,
        ours=mine,
        theirs=other,
        ratio=ratio,
        low=low,
        high=high,
        best_ratio=best / best_other,
        asked=ASKED,
        met=ratio <= ASKED,
    )


def _range(ratios: list[float]) -> tuple[float, float]:
    """Leave out the lowest and the highest tenth."""
    ordered = sorted(ratios)
    left_out = len(ordered) // 10
    return ordered[left_out], ordered[-1 - left_out]
