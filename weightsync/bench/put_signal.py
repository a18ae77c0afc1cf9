"""Case ``put-signal``: one put, its signal and the wait for it, against a memcpy.

Rank 0 and each receiver in turn play ping-pong: the one puts and signals, the other
has waited for it and answers in kind; half of the time of both is one way. Some follow
each other at once, then every byte is verified.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from weightsync.bench import besides
from weightsync.bench.meeting import meeting
from weightsync.bench.numbers import add_engine, add_runs
from weightsync.bench.patterns import verify
from weightsync.bench.places import place
from weightsync.bench.results import GpuFigures, PutResult, PutRow, Spread
from weightsync.bench.runner import Line, RunError
from weightsync.bench.units import format_size, parse_count, parse_size, parse_sizes
from weightsync.window import Window

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from weightsync.announcing import EngineName
    from weightsync.bench.besides import Besides
    from weightsync.bench.places import Copying

DESCRIPTION: Final = """\
One put, its signal, and the wait for it: time one way, and bandwidth with several puts
in flight. Between processes of a weightsync-shm group, or of weightsync-nccl2 on GPUs,
where a broadcast by NCCL stands beside, the kernels that the puts launch are counted,
and puts go on beside a computation."""

SIZES: Final = (8, 64, *(256 << 2 * power for power in range(11)))
"""8 B to 256 MiB."""

WAIT_SECONDS: Final = 60.0
IN_A_ROW: Final = 16
"""Ping-pongs between two verifications, where latency is measured."""

MAX_DEPTH: Final = 64
MAX_BURST: Final = 64 << 20
"""Puts and bytes in flight at most; the bytes are beyond what caches hold."""

BYTES_PER_SIZE: Final = 1 << 30
"""Large sizes are repeated less often, so that each moves about this much."""

FEWEST: Final = 7


@dataclass(frozen=True, slots=True)
class Phase:
    """``count`` puts of one size: in flight together, or one after the other's answer.

    Each has a place of its own in the window, so that all can be verified at the end of
    a repetition.
    """

    size: int
    count: int
    together: bool
    warmup: int
    repetitions: int

    @property
    def nbytes(self) -> int:
        """Bytes of one repetition."""
        return self.size * self.count

    def key(self, number: int, sender: int, receiver: int) -> tuple[int, ...]:
        """What the pattern of a repetition depends on."""
        return self.size, self.count, int(self.together), number, sender, receiver


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of one way, and of the memcpy, that a phase took."""

    put: list[float]
    memcpy: list[float]


@dataclass(frozen=True, slots=True)
class PutCase:
    """What to measure; ``window`` in bytes holds at least the largest size."""

    sizes: tuple[int, ...] = SIZES
    window: int = 256 << 20
    ranks: int = 2
    repetitions: int = 100
    warmup: int = 20
    engine: EngineName = "shm"

    def check(self) -> None:
        """Raise ValueError where it cannot be measured."""
        if self.ranks < 2:
            raise ValueError(
                "--ranks must be at least 2: one sends, the others receive"
            )
        if max(self.sizes) > self.window:
            raise ValueError(f"--window {self.window} is smaller than the largest size")

    def phases(self) -> Iterator[Phase]:
        """Everything to measure, in order, equal on all ranks."""
        for size in self.sizes:
            depth = self.depth(size)
            yield self._phase(size, min(depth, IN_A_ROW), together=False)
            if depth > 1:
                yield self._phase(size, depth, together=True)

    def _phase(self, size: int, count: int, *, together: bool) -> Phase:
        fitting = max(BYTES_PER_SIZE // (size * count), FEWEST)
        repetitions = min(self.repetitions, fitting)
        warmup = min(self.warmup, repetitions)
        return Phase(size, count, together, warmup, repetitions)

    def depth(self, size: int) -> int:
        """How many puts of a size are in flight where bandwidth is measured."""
        return max(1, min(MAX_DEPTH, min(self.window, MAX_BURST) // size))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = PutCase()
    parser.set_defaults(make=_case)
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=default.sizes,
        metavar="SIZE,...",
        help="bytes of a put, as in 8,64KiB,1MiB (default: 8 B to 256 MiB)",
    )
    parser.add_argument(
        "--window",
        type=parse_size,
        default=None,
        metavar="SIZE",
        help="bytes of each rank's window (default: enough for the sizes, at least "
        f"{format_size(MAX_BURST)})",
    )
    parser.add_argument(
        "--ranks",
        type=parse_count,
        default=default.ranks,
        metavar="N",
        help="processes: one sends, the others receive (default: %(default)s)",
    )
    note = "; fewer for large sizes"
    add_runs(parser, default.repetitions, default.warmup, note)
    add_engine(parser)


def _case(found: argparse.Namespace) -> list[Any]:
    window: int | None = found.window
    if window is None:
        window = max(MAX_BURST, *found.sizes)
    runs = found.repetitions, found.warmup
    case = PutCase(found.sizes, window, found.ranks, *runs, found.engine)
    case.check()
    return [case]


class Rank:
    """One rank: its window, and the memory that it puts from."""

    def __init__(self, case: PutCase, rank: int, store: str) -> None:
        self.case: Final = case
        self.rank: Final = rank
        self.verified = 0
        self.place: Final = place(case.engine, rank)
        dist.init_process_group(
            self.place.backend,
            store=dist.FileStore(store, case.ranks),
            rank=rank,
            world_size=case.ranks,
            device_id=self.place.bound,
        )
        group = dist.group.WORLD
        if group is None:
            raise RunError("there is no process group")
        memory, self.source = self.place.window(group, case.window)
        self.window: Final = Window(group, memory)
        self.window.connect(range(case.ranks))

    def close(self) -> None:
        """Leave, together with the others."""
        self.window.close()
        dist.destroy_process_group()

    def pieces(self, phase: Phase) -> list[tuple[int, Tensor]]:
        """What to put, and at which offset."""
        parts = torch.split(self.source[: phase.nbytes], phase.size)
        return [(number * phase.size, part) for number, part in enumerate(parts)]

    def put(self, peer: int, pieces: Sequence[tuple[int, Tensor]]) -> None:
        """Put and signal; return when the source may change."""
        puts = [self.window.put(part, peer, offset=at) for at, part in pieces]
        for put in puts:
            put.wait()

    def wait(self, peer: int, signals: int) -> None:
        """Wait for the signals of ``peer``."""
        self.window.wait_signal(peer, signals, timeout=WAIT_SECONDS).wait()

    def beside(self) -> Besides | None:
        """Measure what stands beside puts between GPUs; None on CPUs."""
        if self.case.engine == "shm":
            return None
        self.window.expose()
        sizes = self.case.sizes
        found = besides.find(self.source, sizes, self._burst, self.rank)
        self.window.conceal()
        return found

    def _burst(self) -> None:
        """One side of puts of the largest size to everybody."""
        size = max(self.case.sizes)
        if self.rank:
            self.wait(0, self.case.depth(size))
            return
        parts = [(0, self.source[:size])] * self.case.depth(size)
        for peer in range(1, self.case.ranks):
            self.put(peer, parts)

    def prepare(self, phase: Phase, number: int, receiver: int) -> None:
        """Write what this repetition puts, and let the other put."""
        key = phase.key(number, self.rank, receiver)
        self.place.fill(self.source[: phase.nbytes], *key)
        self.window.expose()

    def check(self, phase: Phase, number: int, sender: int) -> None:
        """Verify what has arrived in a repetition."""
        self.window.conceal()
        what = f"rank {self.rank}, {phase.nbytes} bytes from rank {sender}"
        found = self.place.host(self.window.local[: phase.nbytes])
        verify(found, *phase.key(number, sender, self.rank), what=what)
        self.verified += phase.nbytes


Sent = tuple[int, list[Samples], "Besides | None"]


def send(_: Line, case: PutCase, store: str) -> Sent:
    """Be rank 0; return the bytes verified, what each phase took, what is beside."""
    rank = Rank(case, 0, store)
    copy = rank.place.copying(case.window)
    found: list[Samples] = []
    for phase in case.phases():
        samples = Samples([], [])
        for number in range(phase.warmup + phase.repetitions):
            counted = samples if number >= phase.warmup else Samples([], [])
            for peer in range(1, case.ranks):
                _repeat(rank, copy, phase, (number, peer), counted)
        found.append(samples)
    copy.close()
    beside = rank.beside()
    rank.close()
    return rank.verified, found, beside


def _repeat(
    rank: Rank, copy: Copying, phase: Phase, which: tuple[int, int], samples: Samples
) -> None:
    """Play with one receiver and time the memcpy; which comes first alternates."""
    number, peer = which
    rank.wait(peer, 1)
    rank.prepare(phase, number, peer)
    if number % 2:
        samples.memcpy.extend(_copy(rank, copy, phase))
    samples.put.extend(_play(rank, phase, peer))
    if not number % 2:
        samples.memcpy.extend(_copy(rank, copy, phase))
    rank.check(phase, number, peer)


def _copy(rank: Rank, copy: Copying, phase: Phase) -> list[float]:
    if phase.together:
        return [copy.seconds(rank.source[: phase.nbytes], phase.size)]
    return [copy.seconds(part, phase.size, at) for at, part in rank.pieces(phase)]


def _play(rank: Rank, phase: Phase, peer: int) -> list[float]:
    """Half of the time of each ping-pong."""
    pieces = rank.pieces(phase)
    rounds = [pieces] if phase.together else [[piece] for piece in pieces]
    found: list[float] = []
    for served in rounds:
        began = time.perf_counter()
        rank.put(peer, served)
        rank.wait(peer, len(served))
        found.append((time.perf_counter() - began) / 2)
    return found


def receive(
    _: Line, case: PutCase, number_of_rank: int, store: str
) -> tuple[int, None, None]:
    """Be a receiver; return the bytes verified."""
    rank = Rank(case, number_of_rank, store)
    for phase in case.phases():
        for number in range(phase.warmup + phase.repetitions):
            rank.prepare(phase, number, 0)
            pieces = rank.pieces(phase)
            rounds = [pieces] if phase.together else [[piece] for piece in pieces]
            rank.window.signal(0).wait()
            for served in rounds:
                rank.wait(0, len(served))
                rank.put(0, served)
            rank.check(phase, number, 0)
    rank.beside()
    rank.close()
    return rank.verified, None, None


def run(case: PutCase, *, timeout: float = 600.0) -> PutResult:
    """Measure; VerificationError where a byte is wrong."""
    with meeting(case.engine, case.ranks) as (started, store):
        children = [started.start("rank 0", send, case, store)]
        children += [
            started.start(f"rank {rank}", receive, case, rank, store)
            for rank in range(1, case.ranks)
        ]
        said = started.gather(children, timeout)
    verified = sum(nbytes for nbytes, *_ in said)
    _, samples, beside = said[0]
    found = dict(zip(case.phases(), samples, strict=True))
    rows = [_row(found, case, size, beside) for size in case.sizes]
    parameters = {
        "window": case.window,
        "ranks": case.ranks,
        "repetitions": case.repetitions,
        "warmup": case.warmup,
    }
    if beside is None:
        return PutResult(parameters, verified, rows)
    on = GpuFigures(beside.emulated, beside.kernels, beside.overlap)
    return PutResult(parameters, verified, rows, on)


def _row(
    found: dict[Phase, Samples], case: PutCase, size: int, beside: Besides | None
) -> PutRow:
    of_size = {phase.together: phase for phase in found if phase.size == size}
    one = found[of_size[False]]
    # A size that fills the window is in flight alone.
    many_phase = of_size.get(True, of_size[False])
    many = found[many_phase]
    latency, memcpy = Spread.of(one.put), Spread.of(one.memcpy)
    burst, memcpy_burst = Spread.of(many.put), Spread.of(many.memcpy)
    nbytes = size * case.depth(size)
    return PutRow(
        size=size,
        depth=case.depth(size),
        latency=latency,
        memcpy=memcpy,
        burst=burst,
        memcpy_burst=memcpy_burst,
        ratio=memcpy.p50 / latency.p50,
        bandwidth=nbytes / burst.p50,
        memcpy_bandwidth=nbytes / memcpy_burst.p50,
        bandwidth_ratio=memcpy_burst.p50 / burst.p50,
        broadcast=None if beside is None else Spread.of(beside.broadcasts[size]),
    )
