"""Case ``put-signal``: one put, its signal and the wait for it, against a memcpy.

Rank 0 and each receiver in turn play ping-pong: the one puts and signals, the other
has waited for it and answers in kind; half of the time of both is one way. A receiver
sleeps in its wait when a put begins, as generators do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

import weightsync.backend
from weightsync.bench.memory import Memcpy, resident_tensor
from weightsync.bench.patterns import fill, verify
from weightsync.bench.results import PutResult, PutRow, Spread
from weightsync.bench.runner import Line, Processes, RunError
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES: Final = (8, 64, *(256 << 2 * power for power in range(11)))
"""8 B to 256 MiB."""

WAIT_SECONDS: Final = 60.0
MAX_DEPTH: Final = 64
MAX_BURST: Final = 64 << 20
"""Puts and bytes in flight at most; the bytes are beyond what caches hold."""

BYTES_PER_SIZE: Final = 1 << 30
"""Large sizes are repeated less often, so that each moves about this much."""

FEWEST: Final = 7


@dataclass(frozen=True, slots=True)
class PutCase:
    """What to measure; ``window`` in bytes holds at least the largest size."""

    sizes: tuple[int, ...] = SIZES
    window: int = 256 << 20
    ranks: int = 2
    repetitions: int = 100
    warmup: int = 20

    def check(self) -> None:
        """Raise ValueError where it cannot be measured."""
        if self.ranks < 2:
            raise ValueError(
                "--ranks must be at least 2: one sends, the others receive"
            )
        if max(self.sizes) > self.window:
            raise ValueError(f"--window {self.window} is smaller than the largest size")

    def phases(self) -> Iterator[tuple[int, int, int, int]]:
        """Size, puts in flight, warm-up and repetitions of each measurement."""
        for size in self.sizes:
            for depth in sorted({1, self.depth(size)}):
                fitting = BYTES_PER_SIZE // (size * depth)
                repetitions = min(self.repetitions, max(fitting, FEWEST))
                yield size, depth, min(self.warmup, repetitions), repetitions

    def depth(self, size: int) -> int:
        """How many puts of a size are in flight where bandwidth is measured."""
        return max(1, min(MAX_DEPTH, min(self.window, MAX_BURST) // size))


class Phase:
    """Seconds of one way and of the memcpy, for one size and depth."""

    def __init__(self, size: int, depth: int) -> None:
        self.size: Final = size
        self.depth: Final = depth
        self.put: Final[list[float]] = []
        self.memcpy: Final[list[float]] = []


class Rank:
    """One rank: its window, and the memory that it puts from."""

    def __init__(self, case: PutCase, rank: int, store: str) -> None:
        self.case: Final = case
        self.rank: Final = rank
        self.verified = 0
        dist.init_process_group(
            weightsync.backend.SHM,
            store=dist.FileStore(store, case.ranks),
            rank=rank,
            world_size=case.ranks,
        )
        group = dist.group.WORLD
        if group is None:
            raise RunError("there is no process group")
        self.window: Final = Window(group, Window.allocate(group, case.window))
        self.window.connect(range(case.ranks))
        self.source: Final = resident_tensor(case.window)

    def close(self) -> None:
        """Leave, together with the others."""
        self.window.close()
        dist.destroy_process_group()

    def put(self, peer: int, size: int, depth: int) -> None:
        """Put ``depth`` times ``size`` bytes and wait until they are read here."""
        pieces = torch.split(self.source[: size * depth], size)
        puts = [
            self.window.put(piece, peer, offset=number * size)
            for number, piece in enumerate(pieces)
        ]
        for put in puts:
            put.wait()

    def wait(self, peer: int, signals: int) -> None:
        """Wait for the signals of ``peer``; the window can be read after it."""
        self.window.wait_signal(peer, signals, timeout=WAIT_SECONDS).wait()

    def expose(self) -> None:
        """Let the others put."""
        self.window.expose()

    def check(self, nbytes: int, key: tuple[int, ...]) -> None:
        """Verify what has arrived."""
        self.window.conceal()
        what = f"rank {self.rank}, {nbytes} bytes from rank {key[-1]}"
        verify(self.window.local[:nbytes], *key, what=what)
        self.verified += nbytes


def send(_: Line, case: PutCase, store: str) -> tuple[int, list[Phase]]:
    """Be rank 0; return the bytes verified, and what was measured."""
    rank = Rank(case, 0, store)
    copy = Memcpy(case.window)
    phases: list[Phase] = []
    for size, depth, warmup, repetitions in case.phases():
        phase = Phase(size, depth)
        for number in range(warmup + repetitions):
            for peer in range(1, case.ranks):
                one_way, memcpy = _ping(rank, copy, phase, peer, number)
                if number >= warmup:
                    phase.put.append(one_way)
                    phase.memcpy.append(memcpy)
        phases.append(phase)
    copy.close()
    rank.close()
    return rank.verified, phases


def _ping(
    rank: Rank, copy: Memcpy, phase: Phase, peer: int, number: int
) -> tuple[float, float]:
    """One ping-pong and one memcpy; which comes first alternates."""
    size, depth = phase.size, phase.depth
    nbytes = size * depth
    rank.wait(peer, 1)
    fill(rank.source[:nbytes], size, depth, number, peer, 0)
    rank.expose()
    memcpy = copy.seconds(rank.source[:nbytes], size) if number % 2 else 0.0
    began = time.perf_counter()
    rank.put(peer, size, depth)
    rank.wait(peer, depth)
    both_ways = time.perf_counter() - began
    if not number % 2:
        memcpy = copy.seconds(rank.source[:nbytes], size)
    rank.check(nbytes, (size, depth, number, 0, peer))
    return both_ways / 2, memcpy


def receive(_: Line, case: PutCase, rank_number: int, store: str) -> tuple[int, None]:
    """Be a receiver; return the bytes verified."""
    rank = Rank(case, rank_number, store)
    for size, depth, warmup, repetitions in case.phases():
        nbytes = size * depth
        for number in range(warmup + repetitions):
            fill(rank.source[:nbytes], size, depth, number, 0, rank_number)
            rank.expose()
            rank.window.signal(0).wait()
            rank.wait(0, depth)
            rank.put(0, size, depth)
            rank.check(nbytes, (size, depth, number, rank_number, 0))
    rank.close()
    return rank.verified, None


def run(case: PutCase, *, timeout: float = 600.0) -> PutResult:
    """Measure; VerificationError where a byte is wrong."""
    with (
        TemporaryDirectory(prefix="weightsync-bench-") as folder,
        Processes() as started,
    ):
        store = str(Path(folder) / "store")
        children = [started.start("rank 0", send, case, store)]
        children += [
            started.start(f"rank {rank}", receive, case, rank, store)
            for rank in range(1, case.ranks)
        ]
        said = started.gather(children, timeout)
    verified = sum(nbytes for nbytes, _ in said)
    found = {(phase.size, phase.depth): phase for phase in said[0][1]}
    rows = [_row(found[size, 1], found[size, case.depth(size)]) for size in case.sizes]
    parameters = {
        "window": case.window,
        "ranks": case.ranks,
        "repetitions": case.repetitions,
        "warmup": case.warmup,
    }
    return PutResult(parameters, verified, rows)


def _row(one: Phase, many: Phase) -> PutRow:
    latency, memcpy = Spread.of(one.put), Spread.of(one.memcpy)
    burst, memcpy_burst = Spread.of(many.put), Spread.of(many.memcpy)
    nbytes = many.size * many.depth
    return PutRow(
        size=one.size,
        depth=many.depth,
        latency=latency,
        memcpy=memcpy,
        burst=burst,
        memcpy_burst=memcpy_burst,
        ratio=memcpy.p50 / latency.p50,
        bandwidth=nbytes / burst.p50,
        memcpy_bandwidth=nbytes / memcpy_burst.p50,
        bandwidth_ratio=memcpy_burst.p50 / burst.p50,
    )
