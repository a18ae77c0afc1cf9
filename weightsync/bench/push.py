"""Case ``push``: whole state dicts through Trainer and Generator, against a memcpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec.structs import replace

from weightsync.bench import memory
from weightsync.bench.besides import broadcast
from weightsync.bench.meeting import meeting
from weightsync.bench.numbers import add_engine, add_runs
from weightsync.bench.places import has_kernels, variables
from weightsync.bench.push_director import Director, Measured
from weightsync.bench.push_model import (
    DTYPE,
    MASTER,
    MOST_ROW_BYTES,
    ROW_BYTES,
    SMALL_BYTES,
    Cut,
    Model,
)
from weightsync.bench.push_ranks import Job, ModeName
from weightsync.bench.results import GpuFigures, PushResult, PushRow, Spread
from weightsync.bench.runner import Processes, RunError
from weightsync.bench.units import format_size, parse_count, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from weightsync.announcing import EngineName

DESCRIPTION: Final = """\
Whole state dicts through Trainer and Generator: from the call of push until receive has
returned on the last generator, with the pauses of both event loops and the rise of
memory. On GPUs also a broadcast by NCCL of the same bytes, the kernels that a push
launches, and how far a computation on the trainers slows it."""

MODES: Final[tuple[ModeName, ...]] = ("staged", "swap", "inplace")

Layout = Literal["same", "rows", "columns"]
LAYOUTS: Final[tuple[Layout, ...]] = ("same", "rows", "columns")

SMALL_TENSORS: Final = 5000
SMALL_NBYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class PushCase:
    """What to measure.

    ``layout``: everyone has whole tensors, trainer ranks cut their rows, or the
    ``ranks`` of each replica cut their columns into rows of ``row_bytes``. ``replay``
    lets trainers keep each version.
    """

    total: int = 1 << 30
    tensors: int = 300
    modes: tuple[ModeName, ...] = MODES
    trainers: int = 1
    replicas: int = 1
    repetitions: int = 7
    warmup: int = 2
    small: bool = False
    small_tensors: int = SMALL_TENSORS
    layout: Layout = "same"
    ranks: int = 1
    row_bytes: int = ROW_BYTES
    cast: bool = False
    replay: bool = False
    engine: EngineName = "shm"

    def check(self) -> None:
        """Raise ValueError where it cannot be measured."""
        least = self.tensors * 2 * max(SMALL_BYTES, self.row_bytes * self.ranks)
        if not self.small and self.total < least:
            raise ValueError(
                f"--total must be {format_size(least)} or more for {self.tensors} "
                f"tensors"
            )
        if self.row_bytes % DTYPE.itemsize or self.row_bytes > MOST_ROW_BYTES:
            raise ValueError(
                f"--row-bytes must be a multiple of {DTYPE.itemsize}, at most "
                f"{format_size(MOST_ROW_BYTES)}"
            )
        self._check_layout()

    def _check_layout(self) -> None:
        if self.cast and not has_kernels(self.engine):
            raise ValueError("--cast needs --engine shm or GPUs that have kernels")
        if self.small and self.layout != "same":
            raise ValueError("--small needs --layout same")
        if self.layout == "rows" and self.trainers < 2:
            raise ValueError("--layout rows needs --trainers 2 or more")
        if self.layout == "columns" and self.ranks < 2:
            raise ValueError("--layout columns needs --ranks 2 or more")
        if self.layout != "columns" and self.ranks > 1:
            raise ValueError("--ranks needs --layout columns")

    @property
    def ranks_in_all(self) -> int:
        """How many processes there are."""
        return self.trainers + self.replicas * self.ranks

    def models(self) -> list[Model]:
        """The state dicts to push: a model, or many small tensors and one large."""
        if not self.small:
            width = self.row_bytes * self.ranks
            return [Model.like_a_transformer(self.total, self.tensors, width)]
        many = Model.many_small(self.small_tensors, SMALL_NBYTES)
        return [many, Model.one_large(self.small_tensors, SMALL_NBYTES)]

    def jobs(self) -> Iterator[Job]:
        """One measurement for each mode and state dict."""
        rows = self.trainers if self.layout == "rows" else 1
        for mode in self.modes:
            for model in self.models():
                yield Job(
                    model,
                    mode,
                    Cut(rows, self.ranks),
                    self.cast,
                    self.replay,
                    self.trainers,
                    self.replicas,
                    self.warmup + self.repetitions,
                    self.engine,
                    self.warmup,
                )

    def needed(self) -> int:
        """Bytes of memory that the largest measurement takes."""
        slots = 2 if "swap" in self.modes else 1
        each = max(model.nbytes for model in self.models())
        source = each * MASTER.itemsize // DTYPE.itemsize if self.cast else each
        sources = 2 if self.layout == "rows" else 1 + self.trainers
        sources += self.replay * (sources - 1)
        return source * sources + each * (1 + self.replicas * (1 + slots))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = PushCase()
    parser.set_defaults(make=_case)
    parser.add_argument(
        "--total",
        type=parse_size,
        default=default.total,
        metavar="SIZE",
        help="bytes of the state dict (default: 1 GiB)",
    )
    parser.add_argument(
        "--tensors",
        type=parse_count,
        default=None,
        metavar="N",
        help=f"tensors of the state dict (default: {default.tensors}; "
        f"{SMALL_TENSORS} with --small)",
    )
    parser.add_argument(
        "--mode",
        choices=(*MODES, "all"),
        default="all",
        help="of the generators (default: %(default)s)",
    )
    _layout_arguments(parser)
    add_runs(parser, default.repetitions, default.warmup)
    add_engine(parser)


def _layout_arguments(parser: argparse.ArgumentParser) -> None:
    default = PushCase()
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=default.layout,
        help="same: everyone has whole tensors; rows: trainer ranks cut each, as FSDP2 "
        "does; columns: ranks of a replica do, in strides (default: %(default)s)",
    )
    for name, value, what in (
        ("trainers", None, "trainer ranks, one process each (default: 1; 2 by rows)"),
        ("replicas", 1, "replicas (default: %(default)s)"),
        ("ranks", None, "ranks of each, one process each (default: 1; 2 by columns)"),
    ):
        parser.add_argument(
            f"--{name}", type=parse_count, default=value, metavar="N", help=what
        )
    parser.add_argument(
        "--row-bytes",
        type=parse_size,
        default=default.row_bytes,
        metavar="SIZE",
        help="bytes of a row of a generator's tensor (default: 1 KiB)",
    )
    for name, what in (
        ("small", "push many tensors of 1 KiB, and one of the same bytes, instead"),
        ("cast", "push float32 into bfloat16"),
        ("replay", "let trainers keep a copy of each version"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)


def _case(found: argparse.Namespace) -> list[Any]:
    tensors = SMALL_TENSORS if found.small else PushCase().tensors
    tensors = tensors if found.tensors is None else found.tensors
    case = PushCase(
        total=found.total,
        tensors=PushCase().tensors if found.small else tensors,
        modes=MODES if found.mode == "all" else (found.mode,),
        trainers=found.trainers or (2 if found.layout == "rows" else 1),
        replicas=found.replicas,
        repetitions=found.repetitions,
        warmup=found.warmup,
        small=found.small,
        small_tensors=tensors if found.small else SMALL_TENSORS,
        layout=found.layout,
        ranks=found.ranks or (2 if found.layout == "columns" else 1),
        row_bytes=found.row_bytes,
        cast=found.cast,
        replay=found.replay,
        engine=found.engine,
    )
    case.check()
    return [case]


def run(case: PushCase, *, timeout: float = 600.0) -> PushResult:
    """Measure; VerificationError where a byte is wrong, RunError without the memory."""
    needed, available = case.needed(), memory.available()
    if needed > available:
        message = (
            f"{format_size(needed)} of memory are needed, {format_size(available)} are "
            "available: choose a smaller --total"
        )
        raise RunError(message)
    measured = [_measure(job, case, timeout) for job in case.jobs()]
    rows = [row for row, _ in measured]
    parameters = {
        "total": case.total,
        "tensors": case.small_tensors if case.small else case.tensors,
        "trainers": case.trainers,
        "replicas": case.replicas,
        "ranks": case.ranks,
        "repetitions": case.repetitions,
        "warmup": case.warmup,
        "row_bytes": case.row_bytes,
        "cast": int(case.cast),
        "replay": int(case.replay),
    }
    verified = sum(row.verified for row in rows)
    gpu = _together([figures for _, figures in measured if figures is not None])
    small = _small_factor(rows)
    return PushResult(parameters, verified, rows, small, case.layout, gpu)


def _small_factor(rows: list[PushRow]) -> dict[str, float]:
    one = {row.mode: row.visible.p50 for row in rows if row.case == "one"}
    return {
        row.mode: row.visible.p50 / one[row.mode] for row in rows if row.case == "small"
    }


def _measure(job: Job, case: PushCase, timeout: float) -> Measured:
    """Measure one job; on GPUs also a broadcast, and a push beside a computation."""
    row, figures = _run(job, case, timeout)
    if figures is None:
        return row, None
    row = replace(row, broadcast=_broadcast(job, case, timeout))
    if not figures.emulated:
        beside, _ = _run(
            dataclasses.replace(job, computing=row.visible.p50), case, timeout
        )
        overlap = beside.visible.p50 / row.visible.p50
        figures = GpuFigures(figures.emulated, figures.kernels, overlap)
    return row, figures


def _run(job: Job, case: PushCase, timeout: float) -> Measured:
    with Processes(variables(job.engine, case.ranks_in_all)) as started:
        return Director(started, job, timeout).run(case.warmup)


def _broadcast(job: Job, case: PushCase, timeout: float) -> Spread:
    """One by NCCL of the bytes of the model, to as many ranks as there are."""
    ranks = case.ranks_in_all
    with meeting(job.engine, ranks) as (started, store):
        children = [
            started.start(
                f"rank {rank}", broadcast, rank, ranks, job.model.nbytes, store
            )
            for rank in range(ranks)
        ]
        return Spread.of(started.gather(children, timeout)[0])


def _together(found: list[GpuFigures]) -> GpuFigures | None:
    """The worst of what several jobs found."""
    if not found:
        return None
    kernels = [each.kernels for each in found if each.kernels is not None]
    overlaps = [each.overlap for each in found if each.overlap is not None]
    return GpuFigures(
        any(each.emulated for each in found),
        max(kernels, default=None),
        max(overlaps, default=None),
    )
