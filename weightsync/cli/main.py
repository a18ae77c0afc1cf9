"""The command ``weightsync``: its subcommands, and exit codes for errors."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from weightsync.cli import emulate, plan
from weightsync.errors import PlanError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 2 for bad input, 1 for what is missing.

    Exits with code 2 where the arguments themselves are wrong, as argparse does.
    """
    found = _parser().parse_args(argv)
    try:
        found.run(found)
    except WeightSyncError as error:
        print(f"weightsync {found.command}: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, PlanError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightsync",
        description="Moves model weights from trainers to generators.",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    added = commands.add_parser(
        "plan", help="who sends what to whom", description=plan.DESCRIPTION
    )
    plan.add_arguments(added)
    added.set_defaults(run=plan.run)
    added = commands.add_parser(
        "emulate", help="a program on emulated GPUs", description=emulate.DESCRIPTION
    )
    emulate.add_arguments(added)
    added.set_defaults(run=emulate.run)
    return parser
