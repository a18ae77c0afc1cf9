"""Case ``elastic``: what replicas that die, freeze and join cost the others."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.elastic_ranks import ROW_BYTES, TENSORS, Place
from weightsync.bench.elastic_stage import Cycles, Stage
from weightsync.bench.numbers import add_numbers
from weightsync.bench.results import ElasticResult, ElasticRow, Spread
from weightsync.bench.units import format_size, parse_count, parse_size
from weightsync.vigil import LONGEST_LEASE, SHORTEST_LEASE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DESCRIPTION: Final = """\
Replicas that die, freeze and join beside one that does not: seconds from the SIGKILL of
a generator in the middle of a push until the push returns on all trainer ranks, and of
one that is frozen until its lease ends; seconds to join; and how much longer a push
takes to replica A while B joins or dies, over pushes of the same process by turns."""

DIED_ASKED: Final = 2.0
JOINED_ASKED: Final = 1.0
SLOWER_ASKED: Final = 1.05

JOINS: Final = ("in transport.replicas", "has its first version")

PROGRAM: Final = "import torch, weightsync; weightsync.Generator"


@dataclass(frozen=True, slots=True)
class ElasticCase:
    """What to measure: bytes of the model, and how often what is done.

    ``deaths`` of each kind, ``freezes`` for each of the ``leases``, and ``cycles`` of
    joining and dying beside pushes, ``starts`` of Python. 0 leaves these rows out.
    """

    size: int = 64 << 20
    trainers: int = 2
    deaths: int = 10
    freezes: int = 3
    leases: tuple[float, ...] = (1.0, 2.0, 5.0)
    cycles: int = 20
    starts: int = 3
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many processes there are at once."""
        return self.trainers + 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = ElasticCase()
    add_numbers(
        parser,
        ("size", parse_size, default.size, "bytes of the model"),
        ("trainers", parse_count, default.trainers, "trainer ranks, where some die"),
        ("deaths", int, default.deaths, "of each kind; 0 for none"),
        ("freezes", int, default.freezes, "for each lease; 0 for none"),
        ("leases", _leases, default.leases, "seconds, as in 1,2,5"),
        ("cycles", int, default.cycles, "of B joining and dying; 0 for none"),
        ("starts", int, default.starts, "of Python, importing torch; 0 for none"),
        ("seed", int, default.seed, "of the random moments"),
    )
    parser.set_defaults(make=_case)


def _leases(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _case(found: argparse.Namespace) -> list[Any]:
    if found.plot is not None:
        raise ValueError("--plot draws nothing of elastic")
    least = max(found.trainers, 2) * TENSORS * ROW_BYTES
    if found.size < least:
        raise ValueError(f"--size must be at least {format_size(least)}")
    if not all(SHORTEST_LEASE <= lease <= LONGEST_LEASE for lease in found.leases):
        raise ValueError(f"--leases must be at least {SHORTEST_LEASE}")
    names = [each.name for each in fields(ElasticCase)]
    return [ElasticCase(**{name: getattr(found, name) for name in names})]


def run(case: ElasticCase) -> ElasticResult:
    """Measure; raise VerificationError where a byte is wrong."""
    struck, compared = _strikes(case)
    cycles, verified = _cycles(case)
    starts = _starts(case.starts)
    parameters = {
        "size": case.size,
        "trainers": case.trainers,
        "deaths": case.deaths,
        "freezes": case.freezes,
        "cycles": case.cycles,
        "starts": case.starts,
        "seed": case.seed,
    }
    return ElasticResult(parameters, compared + verified, struck + cycles + starts)


def _strikes(case: ElasticCase) -> tuple[list[ElasticRow], int]:
    """Replicas that die and freeze in the middle of a push."""
    rows: list[ElasticRow] = []
    with Stage(case.size, case.trainers) as stage:
        for world in (1, 2) if case.deaths else ():
            place = Place("", "inplace", world=world, fate=signal.SIGKILL)
            seconds = [stage.strike(place) for _ in range(case.deaths)]
            rows.append(_seconds(f"killed, {_of(world)}", seconds, DIED_ASKED))
        for lease in case.leases if case.freezes else ():
            place = Place("", "inplace", lease=lease, fate=signal.SIGSTOP)
            seconds = [stage.strike(place) for _ in range(case.freezes)]
            name = f"frozen, a lease of {lease:g} s"
            rows.append(_seconds(name, seconds, lease + DIED_ASKED))
        return rows, stage.end().verified


def _cycles(case: ElasticCase) -> tuple[list[ElasticRow], int]:
    """B joins and dies beside pushes to A."""
    if not case.cycles:
        return [], 0
    with Stage(case.size, 1) as stage:
        found = Cycles(stage, random.Random(case.seed))  # noqa: S311 -- moments.
        verified = found.run(case.cycles)
    visible = found.visible
    alone, both, burn = visible["alone"], visible["both"], visible["burn"]
    busy = "to A, while a stranger starts, as large as B"
    fair = "to A, while B joins, by the stranger"
    dies = "to A, in which a stranger of that size dies"
    fair_death = "to A, in which B dies, by the stranger"
    death, other = visible["death"], visible["stranger"]
    rows = [
        _seconds(f"B joins: {JOINS[0]}", found.joined, JOINED_ASKED),
        _seconds(f"B joins: {JOINS[1]}", found.first, JOINED_ASKED),
        _ratio("to A, while B joins", visible["join"], alone, SLOWER_ASKED),
        _ratio(busy, burn, alone, None),
        _ratio(fair, visible["join"], burn, SLOWER_ASKED),
        _ratio("to A, in which B dies", death, both, SLOWER_ASKED),
        _ratio(dies, other, both, None),
        _ratio(fair_death, death, other, SLOWER_ASKED),
        _ratio("to A, after B has died", visible["after"], alone, SLOWER_ASKED),
    ]
    return rows, verified


def _of(world: int) -> str:
    return "the only rank" if world == 1 else f"1 rank of {world}"


def _starts(count: int) -> list[ElasticRow]:
    """What happens before a generator can be made."""
    seconds: list[float] = []
    for _ in range(count):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", PROGRAM], check=True)
        seconds.append(time.monotonic() - began)
    name = "starting Python, importing torch"
    return [_seconds(name, seconds, None)] if seconds else []


def _seconds(name: str, seconds: Sequence[float], asked: float | None) -> ElasticRow:
    spread = Spread.of(seconds)
    met = asked is None or spread.p99 < asked
    return ElasticRow(name, "seconds", spread, None, spread.p50, asked, met)


def _ratio(
    name: str, measured: Sequence[float], beside: Sequence[float], asked: float | None
) -> ElasticRow:
    found, quiet = Spread.of(measured), Spread.of(beside)
    value = found.p50 / quiet.p50
    met = asked is None or value < asked
    return ElasticRow(name, "ratio", found, quiet, value, asked, met)
