"""Case ``emulator``: what the emulator of CUDA and NCCL costs on this machine.

Two ranks on emulated GPUs: the time to start, a put against a memcpy of the same bytes,
and an all-reduce of four bytes by C and through torch. No figure is one of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightsync import testing
from weightsync.bench.emulator_ranks import BATCH, MOST_BATCHES, RANKS, REDUCED, measure
from weightsync.bench.numbers import add_numbers
from weightsync.bench.results import EmulatorResult, EmulatorRow, Spread
from weightsync.bench.runner import RunError
from weightsync.bench.units import parse_count, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

DESCRIPTION: Final = """\
What the emulator of CUDA and NCCL costs, between two ranks on emulated GPUs: starting a
program that uses one, over importing torch; a put, by a memcpy of the same bytes; an
all-reduce of four bytes, by C and through torch's own process groups. These are figures
of the emulator, not of any GPU."""

IMPORT: Final = "import torch"
USE: Final = "import torch; torch.empty(1, device='cuda')"

START_ASKED: Final = 1.0
PUT_ASKED: Final = 0.5
REDUCE_ASKED: Final = 200e-6


@dataclass(frozen=True, slots=True)
class EmulatorCase:
    """What to measure: bytes of a put, and how often what is done.

    ``starts`` may be 0, which leaves that out.
    """

    size: int = 64 << 20
    starts: int = 5
    puts: int = 20
    batches: int = 125

    @property
    def ranks(self) -> int:
        """How many processes there are at once."""
        return RANKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = EmulatorCase()
    add_numbers(
        parser,
        ("size", parse_size, default.size, "bytes of a put"),
        ("starts", int, default.starts, "programs that are started; 0 for none"),
        ("puts", parse_count, default.puts, "puts"),
        ("batches", parse_count, default.batches, f"batches of {BATCH} all-reduces"),
    )
    parser.set_defaults(make=_case)


def _case(found: argparse.Namespace) -> list[Any]:
    if found.plot is not None:
        raise ValueError("--plot draws nothing of the emulator")
    if found.size % 8:
        raise ValueError(f"--size {found.size} is no multiple of 8")
    if found.batches > MOST_BATCHES:
        raise ValueError(f"--batches must be at most {MOST_BATCHES}")
    return [EmulatorCase(found.size, found.starts, found.puts, found.batches)]


def run(case: EmulatorCase) -> EmulatorResult:
    """Measure; raise VerificationError, or UnsupportedError without an emulator."""
    rows = [_start(case.starts)] if case.starts > 0 else []
    what = [case.size, case.puts, case.batches]
    (verified, seconds), (more, _) = testing.emulated(
        measure, RANKS, args=what, timeout=300
    )
    rows.append(_put_row(seconds["put"], seconds["memcpy"]))
    rows += [_reduce_row(name, seconds[name]) for name in REDUCED]
    parameters = {
        "size": case.size,
        "starts": case.starts,
        "puts": case.puts,
        "batches": case.batches,
    }
    return EmulatorResult(parameters, verified + more, rows)


def _start(starts: int) -> EmulatorRow:
    plain, emulated = dict(os.environ), {**os.environ, **testing.environment()}
    _seconds_of(IMPORT, plain)  # fills the caches of the kernel
    pairs = [
        (_seconds_of(IMPORT, plain), _seconds_of(USE, emulated)) for _ in range(starts)
    ]
    before, after = ([pair[which] for pair in pairs] for which in (0, 1))
    value = Spread.of(after).p50 - Spread.of(before).p50
    return EmulatorRow(
        name="start",
        measured=Spread.of(after),
        best=min(after),
        beside=Spread.of(before),
        value=value,
        best_value=min(after) - min(before),
        asked=START_ASKED,
        met=value < START_ASKED,
    )


def _seconds_of(program: str, environment: Mapping[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RunError(f"a program ended with {done.returncode}: {done.stderr}")
    return time.perf_counter() - began


def _put_row(puts: Sequence[float], copies: Sequence[float]) -> EmulatorRow:
    value = Spread.of(copies).p50 / Spread.of(puts).p50
    return EmulatorRow(
        name="put",
        measured=Spread.of(puts),
        best=min(puts),
        beside=Spread.of(copies),
        value=value,
        best_value=min(copies) / min(puts),
        asked=PUT_ASKED,
        met=value >= PUT_ASKED,
    )


def _reduce_row(name: str, seconds: Sequence[float]) -> EmulatorRow:
    spread = Spread.of(seconds)
    return EmulatorRow(
        name=f"all-reduce by {name}",
        measured=spread,
        best=min(seconds),
        beside=None,
        value=spread.p50,
        best_value=min(seconds),
        asked=REDUCE_ASKED,
        met=spread.p50 < REDUCE_ASKED,
    )
