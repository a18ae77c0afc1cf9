"""Case ``pool``: the decisions of a large pool whose replicas fail, without the pool.

Leader and hubs are the real code, and so is the encoding of what they say. Network,
clock, store, trainer ranks and ranks of replicas are simulated.
"""

from __future__ import annotations

import gc
import random
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.numbers import add_numbers
from weightsync.bench.pool_job import Job, Pushed
from weightsync.bench.pool_parties import Sizes
from weightsync.bench.results import PoolResult, PoolRow, Spread
from weightsync.bench.units import parse_count

if TYPE_CHECKING:
    import argparse

DESCRIPTION: Final = """\
What the control plane of a large pool costs while replicas fail and come back: the real
leader and hubs with simulated processes, network and clock. The CPU time of the leader
is measured and passes on the simulated clock."""


@dataclass(frozen=True, slots=True)
class PoolCase:
    """What to simulate; ``failing`` is the percentage of replicas per minute."""

    trainers: int = 1000
    replicas: int = 256
    ranks: int = 8
    pushes: int = 20
    every: float = 15.0
    failing: float = 1.0
    seed: int = 1

    def check(self) -> None:
        """Raise ValueError where it cannot be simulated."""
        if not 0 <= self.failing <= 100:
            raise ValueError(f"--failing {self.failing} is no percentage")
        if self.every <= 0:
            raise ValueError(f"--every {self.every} is no number of seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = PoolCase()
    add_numbers(
        parser,
        ("trainers", parse_count, default.trainers, "trainer ranks"),
        ("replicas", parse_count, default.replicas, "replicas"),
        ("ranks", parse_count, default.ranks, "ranks of each replica"),
        ("pushes", parse_count, default.pushes, "pushes after the first"),
        ("every", float, default.every, "simulated seconds from push to push"),
        ("failing", float, default.failing, "replicas of 100 that fail in a minute"),
        ("seed", int, default.seed, "which replicas fail, and when"),
    )
    parser.set_defaults(make=_case)


def _case(found: argparse.Namespace) -> list[Any]:
    if found.plot is not None:
        raise ValueError("--plot draws nothing of the pool")
    case = PoolCase(
        found.trainers,
        found.replicas,
        found.ranks,
        found.pushes,
        found.every,
        found.failing,
        found.seed,
    )
    case.check()
    return [case]


def run(case: PoolCase) -> PoolResult:
    """Simulate; VerificationError where a replica or a rank does not end as it must."""
    # What the collector does is for the simulated ranks in the first place.
    gc.collect()
    gc.disable()
    try:
        row = _run(case)
    finally:
        gc.enable()
    parameters = {name: round(value) for name, value in asdict(case).items()}
    return PoolResult(parameters, row.verified, [row])


def _run(case: PoolCase) -> PoolRow:
    sizes = Sizes(case.trainers, case.replicas, case.ranks)
    job = Job(sizes, random.Random(case.seed))  # noqa: S311 -- no secret.
    job.start()
    start, joins = job.leader_loop.busy, job.store.calls
    first = job.push(case.every)
    kept, began, calls = job.kept, job.clock.now, job.store.calls
    job.let_fail(case.failing / 100 / 60 * case.replicas)
    pushes = [job.push(case.every) for _ in range(case.pushes)]
    seconds, calls = job.clock.now - began, job.store.calls - calls
    verified = job.finish()
    return PoolRow(
        minutes=seconds / 60,
        failures=len(job.failures),
        start_cpu=start,
        join_cpu=start / case.replicas,
        first=first.seconds,
        first_cpu=first.cpu,
        push_cpu=Spread.of([push.cpu for push in pushes]),
        messages=round(median([push.messages for push in pushes])),
        hub_messages=round(median([push.hub_messages for push in pushes])),
        hub_cpu=median([push.hub_cpu for push in pushes]),
        quiet=_seconds(pushes, "nothing"),
        died=_seconds(pushes, "died"),
        frozen=_seconds(pushes, "frozen"),
        joined=_seconds(pushes, "joined"),
        store_start=joins,
        store_join=job.store_of_a_join,
        store_rate=calls / seconds,
        kept_first=kept,
        kept_last=job.kept,
        verified=verified,
    )


def _seconds(pushes: list[Pushed], beside: str) -> Spread | None:
    found = [push.seconds for push in pushes if push.beside == beside]
    return Spread.of(found) if found else None
