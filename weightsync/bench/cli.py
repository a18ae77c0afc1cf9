"""The command line of the benchmark: arguments, and what becomes of the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from weightsync.bench import memory, plots, push, put_signal, tables
from weightsync.bench.environment import Environment
from weightsync.bench.push import MODES, PushCase
from weightsync.bench.put_signal import PutCase
from weightsync.bench.results import Report, Result, unsteady
from weightsync.bench.units import format_size, parse_count, parse_size, parse_sizes
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION: Final = """\
Measures how fast weights move between processes of this machine, through shared
memory, beside a plain memcpy of the same bytes in the same run. Every byte is verified;
a wrong one ends the command with exit code 1. Without a command both run with sensible
sizes, in under three minutes."""

PUT_DESCRIPTION: Final = """\
One put, its signal, and the wait for it, in processes of a weightsync-shm group: time
one way, and bandwidth with several puts in flight."""

PUSH_DESCRIPTION: Final = """\
Whole state dicts through Trainer and Generator: from the call of push until receive has
returned on the last generator, with the pauses of both event loops and the rise of
memory."""

FAILED: Final = 1
QUICK_TOTAL: Final = 1 << 30

Cases = list[PutCase | PushCase]


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
    results: list[Result] = [
        put_signal.run(case) if isinstance(case, PutCase) else push.run(case)
        for case in cases
    ]
    for result in results:
        warnings += unsteady(result)
    return Report(environment, warnings, results)


def _processes(case: PutCase | PushCase) -> int:
    if isinstance(case, PutCase):
        return case.ranks
    return case.trainers + case.replicas


def _write(report: Report, arguments: Arguments) -> None:
    lines = tables.environment_lines(report.environment)
    lines += [f"Warning: {warning}." for warning in report.warnings]
    found = [tables.table(result) for result in report.results]
    tables.show(lines, found, sys.stderr if arguments.json == "-" else sys.stdout)
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
    _put_arguments(
        commands.add_parser(
            "put-signal", help="one put and its signal", description=PUT_DESCRIPTION
        )
    )
    _push_arguments(
        commands.add_parser(
            "push", help="whole state dicts", description=PUSH_DESCRIPTION
        )
    )
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


def _add_runs(
    parser: argparse.ArgumentParser, default: PutCase | PushCase, note: str = ""
) -> None:
    parser.add_argument(
        "--repetitions",
        type=parse_count,
        default=default.repetitions,
        metavar="N",
        help=f"measurements of each row (default: %(default)s{note})",
    )
    parser.add_argument(
        "--warmup",
        type=parse_count,
        default=default.warmup,
        metavar="N",
        help="repetitions before them that do not count (default: %(default)s)",
    )


def _put_arguments(parser: argparse.ArgumentParser) -> None:
    default = PutCase()
    parser.set_defaults(make=_put_case)
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=default.sizes,
        metavar="SIZE,...",
        help="bytes of a put, as in 8,64KiB,1MiB (default: 8 B to 256 MiB)",
    )
    parser.add_argument(
        "--window",
        type=parse_size,
        default=None,
        metavar="SIZE",
        help="bytes of each rank's window (default: enough for the sizes, at least "
        f"{format_size(put_signal.MAX_BURST)})",
    )
    parser.add_argument(
        "--ranks",
        type=parse_count,
        default=default.ranks,
        metavar="N",
        help="processes: one sends, the others receive (default: %(default)s)",
    )
    _add_runs(parser, default, "; fewer for large sizes")
    _add_output(parser)


def _put_case(found: argparse.Namespace) -> Cases:
    window: int | None = found.window
    if window is None:
        window = max(put_signal.MAX_BURST, *found.sizes)
    case = PutCase(found.sizes, window, found.ranks, found.repetitions, found.warmup)
    case.check()
    return [case]


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    default = PushCase()
    parser.set_defaults(make=_push_case)
    parser.add_argument(
        "--total",
        type=parse_size,
        default=default.total,
        metavar="SIZE",
        help="bytes of the state dict (default: 1 GiB)",
    )
    parser.add_argument(
        "--tensors",
        type=parse_count,
        default=None,
        metavar="N",
        help=f"tensors of the state dict (default: {default.tensors}; "
        f"{push.SMALL_TENSORS} with --small)",
    )
    parser.add_argument(
        "--mode",
        choices=(*MODES, "all"),
        default="all",
        help="of the generators (default: %(default)s)",
    )
    for role in ("trainers", "replicas"):
        parser.add_argument(
            f"--{role}",
            type=parse_count,
            default=1,
            metavar="N",
            help=f"number of {role}, one process each (default: %(default)s)",
        )
    parser.add_argument(
        "--small",
        action="store_true",
        help="push many tensors of 1 KiB, and one of the same bytes, instead",
    )
    _add_runs(parser, default)
    _add_output(parser)


def _push_case(found: argparse.Namespace) -> Cases:
    tensors = push.SMALL_TENSORS if found.small else PushCase().tensors
    tensors = tensors if found.tensors is None else found.tensors
    case = PushCase(
        total=found.total,
        tensors=PushCase().tensors if found.small else tensors,
        modes=MODES if found.mode == "all" else (found.mode,),
        trainers=found.trainers,
        replicas=found.replicas,
        repetitions=found.repetitions,
        warmup=found.warmup,
        small=found.small,
        small_tensors=tensors if found.small else push.SMALL_TENSORS,
    )
    case.check()
    return [case]
