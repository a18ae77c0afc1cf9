"""The command ``weightsync emulate``: a program, unchanged, on emulated GPUs."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentTypeError
from typing import Final

from weightsync.bench.units import parse_size
from weightsync.errors import PlanError
from weightsync.testing.environment import (
    DEFAULT_GPUS,
    DEFAULT_NCCL,
    NCCL_VERSIONS,
    environment,
)

DESCRIPTION: Final = """\
Runs a program on emulated GPUs: a CUDA build of torch sees them and their NCCL, in the
program and in everything that it starts. Kernels do not run; docs/emulator.md says what
does. The program replaces this one, so its exit code and its signals are its own; 86
is a hang that was diagnosed."""

USAGE: Final = "weightsync emulate [OPTIONS] -- PROGRAM [ARGUMENTS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = USAGE
    parser.add_argument(
        "--gpus", type=_count, default=DEFAULT_GPUS, help="how many there are (8)"
    )
    parser.add_argument(
        "--memory", type=parse_size, metavar="BYTES", help="of each GPU (16GiB)"
    )
    parser.add_argument(
        "--nccl",
        choices=NCCL_VERSIONS,
        default=DEFAULT_NCCL,
        help=f"whose behaviour is emulated ({DEFAULT_NCCL})",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        dest="faults",
        help="what shall go wrong, such as put@rank=1,n=3:kill; or @FILE",
    )
    parser.add_argument(
        "--hang-seconds",
        type=_seconds,
        metavar="S",
        help="after how long a hang is diagnosed; 0 is never (60)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="with its arguments")


def run(found: argparse.Namespace) -> None:
    """Become the program; return only by an error.

    Raises PlanError for a program that cannot be run, UnsupportedError where there is
    no emulator.
    """
    program = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not program:
        raise PlanError(f"no program is given: {USAGE}")
    variables = environment(
        gpus=found.gpus,
        memory=found.memory,
        nccl=found.nccl,
        faults=found.faults,
        hang_seconds=found.hang_seconds,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(program[0], program, {**os.environ, **variables})  # noqa: S606 -- no shell.
    except OSError as error:
        raise PlanError(f"cannot run {program[0]!r}: {error.strerror}") from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of seconds") from None
