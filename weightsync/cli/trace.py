"""The command ``weightsync trace``: on which operation and rank a job is stuck."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightsync.bench.units import format_seconds
from weightsync.cli.recorded import Kind, find, read
from weightsync.cli.stuck import Fault, judge
from weightsync.errors import PlanError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from weightsync.cli.recorded import Dump, Operation
    from weightsync.cli.stuck import Finding, Verdict

DESCRIPTION: Final = """\
Reads what the flight recorders of a job's ranks wrote, and names the operation and the
rank on which the job is stuck. docs/tracing.md says how to have the ranks write it.
Only the JSON files are read; nothing is unpickled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="the .json file of a rank, or a folder with those of all",
    )


def run(found: argparse.Namespace) -> None:
    """Read the dumps, and say what the ranks wait for.

    Raises PlanError where a file is none of ours, or two are of one rank.
    """
    dumps = [read(path) for path in find(found.paths)]
    ranks = [dump.rank for dump in dumps]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise PlanError(f"two of the files are of rank {rank}")
    for line in lines(sorted(dumps, key=lambda dump: dump.rank), judge(dumps)):
        print(line)


def lines(dumps: Sequence[Dump], verdict: Verdict) -> Iterator[str]:
    """Say what was found."""
    for dump in dumps:
        yield f"Rank {dump.rank} (process {dump.process} on {dump.host}): {dump.reason}"
    if verdict.silent:
        yield f"No dump: {_ranks(verdict.silent)}"
    for finding in verdict.findings:
        yield ""
        yield from _finding(finding)
    yield ""
    yield _summary(verdict)
    for dump in dumps:
        if dump.rank in verdict.roots:
            yield from _last(dump)


def _finding(finding: Finding) -> Iterator[str]:
    operation = finding.operation
    yield (f"{finding.group}, {_place(operation)}: {operation}: {finding.fault.value}")
    if finding.fault is not Fault.MISMATCH:
        verb = "waits" if len(finding.waiting) == 1 else "wait"
        since = f"since {format_seconds(operation.seconds)}"
        yield f"  {_ranks(finding.waiting)} {verb} in it {since}"
    if finding.fault is Fault.MISSING:
        yield f"  not there: {_ranks(finding.missed)}"
    for detail in finding.details:
        yield f"  {detail}"
    if operation.where:
        yield f"  called at {operation.where} (rank {operation.rank})"


def _place(operation: Operation) -> str:
    if operation.kind is Kind.COLLECTIVE:
        return f"collective {operation.number}"
    if operation.kind is Kind.SEND:
        pair = f"{operation.rank} to {operation.peer}"
    elif operation.kind is Kind.MEMBERSHIP:
        return "members"
    else:
        pair = f"{operation.peer} to {operation.rank}"
    what = "signal" if operation.kind is Kind.WAIT else "message"
    return f"{what} {operation.number} from {pair}"


def _summary(verdict: Verdict) -> str:
    if not verdict.findings:
        return "Nothing is stuck: every recorded operation is finished."
    if verdict.cycle:
        circle = [*verdict.cycle, verdict.cycle[0]]
        return "Stuck: " + ", which waits for ".join(f"rank {rank}" for rank in circle)
    if verdict.roots:
        verb = "waits" if len(verdict.roots) == 1 else "wait"
        return f"Stuck on {_ranks(verdict.roots)}, which {verb} for nobody."
    return "Stuck: no rank is missing, so look at the network and the GPUs."


def _last(dump: Dump) -> Iterator[str]:
    if not dump.operations:
        yield f"  rank {dump.rank} recorded no operation"
        return
    last = min(dump.operations, key=lambda operation: operation.seconds)
    state = "finished" if last.finished else "not finished"
    since = format_seconds(last.seconds)
    yield (
        f"  the last call of rank {dump.rank}: {last} in {last.group}, {since} before "
        f"its dump, {state}"
    )
    if last.where:
        yield f"  called at {last.where}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
