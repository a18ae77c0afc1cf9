"""The command line of the benchmark: arguments, and what becomes of the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from weightsync.bench import (
    backend,
    elastic,
    emulator,
    memory,
    plan,
    plots,
    pool,
    push,
    put_signal,
    table,
    tables,
)
from weightsync.bench.backend import BackendCase
from weightsync.bench.elastic import ElasticCase
from weightsync.bench.emulator import EmulatorCase
from weightsync.bench.environment import Environment
from weightsync.bench.plan import PlanCase
from weightsync.bench.pool import PoolCase
from weightsync.bench.push import PushCase
from weightsync.bench.put_signal import PutCase
from weightsync.bench.results import Report, Result, emulated, unsteady
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION: Final = """\
Measures how fast weights move between processes of this machine, through shared
memory, beside a plain memcpy of the same bytes in the same run. Every byte is verified;
a wrong one ends the command with exit code 1. Without a command put-signal and push
run with sensible sizes, in under three minutes."""

FAILED: Final = 1
QUICK_TOTAL: Final = 1 << 30

Case = (
    PutCase | PushCase | PlanCase | EmulatorCase | BackendCase | ElasticCase | PoolCase
)
Cases = list[Case]


class Arguments(NamedTuple):
    """What the command line asks for."""

    cases: Cases
    json: str | None
    plot: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = parse(argv)
    try:
        if arguments.plot is not None:
            plots.check_matplotlib()
        report = measure(arguments.cases)
        _write(report, arguments)
    except WeightSyncError as error:
        print(f"weightsync.bench: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    return 0


def measure(cases: Cases) -> Report:
    """Run all cases; raises VerificationError where a byte is wrong."""
    environment = Environment.here()
    warnings = environment.warnings(max(map(_processes, cases)))
    results = [_run(case) for case in cases]
    for result in results:
        warnings = emulated(result) + warnings + unsteady(result)
    return Report(environment, warnings, results)


def _run(case: Case) -> Result:
    # Each kind of case has its ``run`` beside it.
    result: Result = sys.modules[type(case).__module__].run(case)
    return result


def _processes(case: Case) -> int:
    if isinstance(case, PutCase | EmulatorCase | BackendCase | ElasticCase):
        return case.ranks
    if isinstance(case, PlanCase | PoolCase):
        return 1
    return case.ranks_in_all


def _write(report: Report, arguments: Arguments) -> None:
    lines = tables.environment_lines(report.environment)
    lines += [f"Warning: {warning}." for warning in report.warnings]
    found = [tables.table(result) for result in report.results]
    table.show(lines, found, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text)
    if arguments.plot is not None:
        plots.draw(report.results, arguments.plot)


def parse(argv: Sequence[str] | None) -> Arguments:
    """Read the command line; exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m weightsync.bench", description=DESCRIPTION
    )
    parser.set_defaults(json=None, plot=None, make=None)
    _add_output(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, case, what in (
        ("put-signal", put_signal, "one put and its signal"),
        ("push", push, "whole state dicts"),
        ("plan", plan, "who sends what, at scale"),
        ("emulator", emulator, "CUDA and NCCL emulated"),
        ("backend", backend, "weightsync-nccl2 by torch's nccl2"),
        ("elastic", elastic, "replicas that die, freeze and join"),
        ("pool", pool, "decisions of a large pool whose replicas fail"),
    ):
        added = commands.add_parser(name, help=what, description=case.DESCRIPTION)
        case.add_arguments(added)
        _add_output(added)
    found = parser.parse_args(argv)
    try:
        cases: Cases = both() if found.make is None else found.make(found)
    except ValueError as error:
        parser.error(str(error))
    return Arguments(cases, found.json, found.plot)


def both() -> Cases:
    """What runs without a command; the model shrinks where memory is scarce."""
    total = QUICK_TOTAL
    while total > 1 << 20 and PushCase(total).needed() > memory.available() // 2:
        total //= 2
    small = PushCase(small=True, repetitions=20)
    return [PutCase(), PushCase(total), small]


def _plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in plots.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .svg")
    return path


def _add_output(parser: argparse.ArgumentParser) -> None:
    # Suppressed defaults, so that a command does not undo what stands before it.
    parser.add_argument(
        "--json",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="write the results as JSON; - is standard output, the table then goes to "
        "standard error",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=_plot_path,
        default=argparse.SUPPRESS,
        help="draw the results into a .png or .svg file (needs matplotlib)",
    )
