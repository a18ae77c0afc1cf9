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
    tables,
)
from weightsync.bench.backend import BackendCase
from weightsync.bench.elastic import ElasticCase
from weightsync.bench.emulator import EmulatorCase
from weightsync.bench.environment import Environment
from weightsync.bench.plan import PlanCase
from weightsync.bench.plan_model import MoeModel
from weightsync.bench.pool import PoolCase
from weightsync.bench.push import LAYOUTS, MODES, PushCase
from weightsync.bench.put_signal import PutCase
from weightsync.bench.results import Report, Result, unsteady
from weightsync.bench.units import (
    format_size,
    parse_count,
    parse_counts,
    parse_size,
    parse_sizes,
)
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION: Final = """\
Measures how fast weights move between processes of this machine, through shared
memory, beside a plain memcpy of the same bytes in the same run. Every byte is verified;
a wrong one ends the command with exit code 1. Without a command put-signal and push
run with sensible sizes, in under three minutes."""

PUT_DESCRIPTION: Final = """\
One put, its signal, and the wait for it, in processes of a weightsync-shm group: time
one way, and bandwidth with several puts in flight."""

PUSH_DESCRIPTION: Final = """\
Whole state dicts through Trainer and Generator: from the call of push until receive has
returned on the last generator, with the pauses of both event loops and the rise of
memory."""

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
        warnings += unsteady(result)
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
    return case.trainers + case.replicas * case.ranks


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
    _plan_arguments(
        commands.add_parser(
            "plan", help="who sends what, at scale", description=plan.DESCRIPTION
        )
    )
    for name, case, what in (
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
    _push_layout_arguments(parser)
    _add_runs(parser, default)
    _add_output(parser)


def _push_layout_arguments(parser: argparse.ArgumentParser) -> None:
    default = PushCase()
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=default.layout,
        help="same: everyone has whole tensors; rows: trainer ranks cut each, as FSDP2 "
        "does; columns: ranks of a replica do, in strides (default: %(default)s)",
    )
    for name, value, what in (
        ("trainers", None, "trainer ranks, one process each (default: 1; 2 by rows)"),
        ("replicas", 1, "replicas (default: %(default)s)"),
        ("ranks", None, "ranks of each, one process each (default: 1; 2 by columns)"),
    ):
        parser.add_argument(
            f"--{name}", type=parse_count, default=value, metavar="N", help=what
        )
    parser.add_argument(
        "--row-bytes",
        type=parse_size,
        default=default.row_bytes,
        metavar="SIZE",
        help="bytes of a row of a generator's tensor (default: 1 KiB)",
    )
    for name, what in (
        ("small", "push many tensors of 1 KiB, and one of the same bytes, instead"),
        ("cast", "push float32 into bfloat16"),
        ("replay", "let trainers keep a copy of each version"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)


def _push_case(found: argparse.Namespace) -> Cases:
    tensors = push.SMALL_TENSORS if found.small else PushCase().tensors
    tensors = tensors if found.tensors is None else found.tensors
    case = PushCase(
        total=found.total,
        tensors=PushCase().tensors if found.small else tensors,
        modes=MODES if found.mode == "all" else (found.mode,),
        trainers=found.trainers or (2 if found.layout == "rows" else 1),
        replicas=found.replicas,
        repetitions=found.repetitions,
        warmup=found.warmup,
        small=found.small,
        small_tensors=tensors if found.small else push.SMALL_TENSORS,
        layout=found.layout,
        ranks=found.ranks or (2 if found.layout == "columns" else 1),
        row_bytes=found.row_bytes,
        cast=found.cast,
        replay=found.replay,
    )
    case.check()
    return [case]


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    default = PlanCase()
    parser.set_defaults(make=_plan_case)
    parser.add_argument(
        "--trainers",
        type=parse_counts,
        default=default.ranks,
        metavar="N,...",
        help=f"numbers of trainer ranks (default: {','.join(map(str, default.ranks))})",
    )
    for name, value, what in (
        (
            "expert-parallel",
            default.expert_parallel,
            "groups of trainers that share the experts",
        ),
        (
            "generator-expert-parallel",
            default.generator_expert_parallel,
            "groups of generators that share the experts",
        ),
        (
            "tensor-parallel",
            default.tensor_parallel,
            "generators in each of their groups",
        ),
        ("layers", default.model.num_hidden_layers, "layers of the model"),
        ("experts", default.model.n_routed_experts, "experts of each layer"),
    ):
        parser.add_argument(
            f"--{name}",
            type=parse_count,
            default=value,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    _add_output(parser)


def _plan_case(found: argparse.Namespace) -> Cases:
    case = PlanCase(
        found.trainers,
        found.expert_parallel,
        found.generator_expert_parallel,
        found.tensor_parallel,
        MoeModel(num_hidden_layers=found.layers, n_routed_experts=found.experts),
    )
    case.check()
    return [case]
