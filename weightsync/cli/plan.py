"""The command ``weightsync plan``: its arguments, and what becomes of them."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from weightsync.bench.table import show
from weightsync.cli import picture, report
from weightsync.cli.layouts import read_layout
from weightsync.cli.models import read_model
from weightsync.cli.summary import Bandwidths, Subject, summarize
from weightsync.errors import PlanError

if TYPE_CHECKING:
    from weightsync.cli.summary import Summary

DESCRIPTION: Final = """\
Says who would send what to whom, without moving anything: from a layout of the
trainers, a layout of the generators, and a model. Two TOML files describe the layouts;
docs/planning.md explains them. The plan is one of the tensors that are pushed, so both
layouts are in the model's own names."""

MODEL_HELP: Final = """\
the tensors: a Hugging Face config.json, a .safetensors file or an index of several, a
table in .toml or .json, or a folder with one of the first three"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for role in ("trainers", "generators"):
        parser.add_argument(
            role,
            type=Path,
            metavar=f"{role.upper()}.toml",
            help=f"mesh of the {role}, and how tensors lie on it",
        )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help=MODEL_HELP
    )
    for action in ("send", "receive"):
        parser.add_argument(
            f"--{action}-bandwidth",
            type=_bandwidth,
            metavar="GB/S",
            help=f"what one rank can {action}, in 1e9 bytes per second, to have the "
            "time predicted",
        )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write everything as JSON; - is standard output, the tables then go to "
        "standard error",
    )
    parser.add_argument(
        "--picture",
        type=_picture_path,
        metavar="FILE",
        help="draw the bytes of all pairs into a .png or .svg file (needs matplotlib)",
    )


def run(found: argparse.Namespace) -> None:
    """Plan, and say what was found.

    Raises PlanError for bad input, UnsupportedError where a package is missing.
    """
    if found.picture is not None:
        picture.check_matplotlib()
    subject = Subject(
        str(found.model),
        read_model(found.model),
        read_layout(found.trainers),
        read_layout(found.generators),
    )
    bandwidths = Bandwidths(found.send_bandwidth, found.receive_bandwidth)
    _write(summarize(subject, bandwidths), found)


def _write(summary: Summary, found: argparse.Namespace) -> None:
    stream = sys.stderr if found.json == "-" else sys.stdout
    show(report.lines(summary), list(report.tables(summary)), stream)
    text = msgspec.json.format(msgspec.json.encode(summary)).decode() + "\n"
    try:
        if found.json == "-":
            sys.stdout.write(text)
        elif found.json is not None:
            Path(found.json).write_text(text, encoding="utf-8")
        if found.picture is not None:
            picture.draw(summary, found.picture)
    except OSError as error:
        raise PlanError(f"{error.filename}: {error.strerror}") from error


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GB/s above 0")
    return value * 1e9


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in picture.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .svg")
    return path
