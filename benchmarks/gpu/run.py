"""Everything that needs real GPUs, in ten minutes: tests, benchmarks, and a report.

Run it from a checkout that ``make install`` has prepared; see README.md beside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]

BUDGET_SECONDS: Final = 570.0
"""All of it, so that ten minutes are enough to start, to end and to write."""

SHOWN_LINES: Final = 60
"""Of the end of what a step says, in the report."""

NEVER: Final = (
    "several hosts, and with them the network path of NCCL",
    "ranks that die or freeze while GPUs move bytes (the emulator's tests do that)",
    "how long a put takes while the link is used by others",
)
"""What this script cannot check on any single machine."""


@dataclass(frozen=True)
class Step:
    """One command: at most so many seconds, with at least so many GPUs."""

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a step ended; ``code`` is None where it did not run, or not to its end."""

    step: Step
    code: int | None
    seconds: float
    said: str


def _bench(*arguments: str) -> tuple[str, ...]:
    return ("-m", "weightsync.bench", *arguments)


_PUSH: Final = ("push", "--engine", "nccl", "--total", "1GiB")

STEPS: Final = (
    Step("doctor", ("-m", "weightsync.cli", "doctor"), 30),
    Step("tests", ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"), 180),
    Step(
        "put and signal",
        _bench(
            *("put-signal", "--engine", "nccl", "--repetitions", "20"),
            *("--sizes", "8,64KiB,1MiB,16MiB,256MiB"),
        ),
        90,
    ),
    Step("push", _bench(*_PUSH), 120),
    Step(
        "push of rows to two replicas",
        _bench(*_PUSH, "--layout", "rows", "--replicas", "2", "--mode", "staged"),
        80,
        gpus=4,
    ),
    Step(
        "push of columns",
        _bench(*_PUSH, "--layout", "columns", "--mode", "inplace"),
        60,
        gpus=3,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run all steps; return 0 only if all that ran did well, and some did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("gpu-report.md"),
        help="where to write it (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_SECONDS,
        metavar="SECONDS",
        help="for everything (default: %(default)s)",
    )
    found = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was checked.", file=sys.stderr)
        return 2
    outcomes = _run(found.budget)
    text = report(outcomes)
    found.report.write_text(text)
    print(f"{text}\nThis is also in {found.report}.")
    return 0 if all(outcome.code in {0, None} for outcome in outcomes) else 1


def _run(budget: float) -> list[Outcome]:
    deadline = time.monotonic() + budget
    outcomes: list[Outcome] = []
    for step in STEPS:
        left = deadline - time.monotonic()
        if step.gpus > torch.cuda.device_count():
            reason = f"needs {step.gpus} GPUs, found {torch.cuda.device_count()}"
            outcomes.append(Outcome(step, None, 0.0, reason))
        elif left < 1:
            outcomes.append(Outcome(step, None, 0.0, "no time was left"))
        else:
            print(f"{step.name}: at most {min(step.seconds, left):.0f} s", flush=True)
            outcomes.append(run(step, min(step.seconds, left)))
    return outcomes


def run(step: Step, seconds: float) -> Outcome:
    """Run a step; after so many seconds it is killed, with all that it started."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *step.command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return Outcome(step, -signal.SIGKILL, seconds, f"{said}\nout of time")
    return Outcome(step, process.returncode, time.monotonic() - began, said)


def report(outcomes: list[Outcome]) -> str:
    """Write what is to be pasted."""
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(each) for each in range(count)})
    lines = ["# weightsync on GPUs", "", f"{count} x {', '.join(names)}", ""]
    lines += ["| step | exit code | seconds |", "|---|---|---|"]
    for outcome in outcomes:
        code = "not run" if outcome.code is None else str(outcome.code)
        lines.append(f"| {outcome.step.name} | {code} | {outcome.seconds:.0f} |")
    lines += ["", "## Not checked", ""]
    lines += [
        f"- {outcome.step.name}: {outcome.said}"
        for outcome in outcomes
        if outcome.code is None
    ]
    lines += [f"- {what}" for what in NEVER]
    for outcome in outcomes:
        if outcome.code is not None:
            shown = "\n".join(outcome.said.strip().splitlines()[-SHOWN_LINES:])
            lines += ["", f"## {outcome.step.name}", "", "```", shown, "```"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
