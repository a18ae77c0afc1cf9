"""Options that several cases have, declared alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.bench.places import ENGINES
from weightsync.bench.units import parse_count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_numbers(
    parser: argparse.ArgumentParser,
    *numbers: tuple[str, Callable[[str], Any], Any, str],
) -> None:
    """Declare options: the name, what reads it, its default, and what it says."""
    for name, kind, default, what in numbers:
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )


def add_runs(
    parser: argparse.ArgumentParser, repetitions: int, warmup: int, note: str = ""
) -> None:
    """Declare how often to measure, and how often before that."""
    parser.add_argument(
        "--repetitions",
        type=parse_count,
        default=repetitions,
        metavar="N",
        help=f"measurements of each row (default: %(default)s{note})",
    )
    parser.add_argument(
        "--warmup",
        type=parse_count,
        default=warmup,
        metavar="N",
        help="repetitions before them that do not count (default: %(default)s)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare over what weights move."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="shm: CPUs of this machine; nccl: GPUs, emulated where there are none "
        "(default: %(default)s)",
    )
