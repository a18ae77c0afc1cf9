"""The command ``weightsync``: its subcommands, and exit codes for errors."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final

from weightsync.errors import PlanError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130

COMMANDS: Final = {
    "plan": "who sends what to whom",
    "emulate": "a program on emulated GPUs",
    "doctor": "what is in use here",
    "pool": "who is in a running job",
    "trace": "on which operation and rank a job is stuck",
}
"""Each is a module of this package, which is imported when its command is given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 2 for bad input, 1 for what is missing.

    Exits with code 2 where the arguments themselves are wrong, as argparse does.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    found = _parser(arguments[0] if arguments else "").parse_args(arguments)
    try:
        found.run(found)
    except WeightSyncError as error:
        print(f"weightsync {found.command}: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, PlanError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser(given: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightsync",
        description="Moves model weights from trainers to generators.",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for name, purpose in COMMANDS.items():
        added = commands.add_parser(name, help=purpose)
        if name == given:
            module = importlib.import_module(f"weightsync.cli.{name}")
            added.description = module.DESCRIPTION
            module.add_arguments(added)
            added.set_defaults(run=module.run)
    return parser
