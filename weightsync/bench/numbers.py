"""Options of cases that are numbers, declared alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
