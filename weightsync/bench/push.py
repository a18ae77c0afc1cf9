"""Case ``push``: whole state dicts through Trainer and Generator, against a memcpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightsync.bench import memory
from weightsync.bench.push_ranks import (
    SMALL_BYTES,
    Job,
    Kept,
    Model,
    ModeName,
    Pushed,
    Received,
    generate,
    train,
)
from weightsync.bench.results import PushResult, PushRow, Spread
from weightsync.bench.runner import Child, Processes, RunError
from weightsync.bench.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES: Final[tuple[ModeName, ...]] = ("staged", "swap", "inplace")

SMALL_TENSORS: Final = 5000
SMALL_NBYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class PushCase:
    """What to measure."""

    total: int = 1 << 30
    tensors: int = 300
    modes: tuple[ModeName, ...] = MODES
    trainers: int = 1
    replicas: int = 1
    repetitions: int = 7
    warmup: int = 2
    small: bool = False
    small_tensors: int = SMALL_TENSORS

    def check(self) -> None:
        """Raise ValueError where it cannot be measured."""
        if not self.small and self.total < self.tensors * 2 * SMALL_BYTES:
            least = format_size(self.tensors * 2 * SMALL_BYTES)
            raise ValueError(
                f"--total must be {least} or more for {self.tensors} tensors"
            )

    def models(self) -> list[Model]:
        """The state dicts to push: a model, or many small tensors and one large."""
        if not self.small:
            return [Model.like_a_transformer(self.total, self.tensors)]
        many = Model.many_small(self.small_tensors, SMALL_NBYTES)
        return [many, Model.one_large(many.nbytes)]

    def jobs(self) -> Iterator[Job]:
        """One measurement for each mode and state dict."""
        versions = self.warmup + self.repetitions
        for mode in self.modes:
            for model in self.models():
                yield Job(model, mode, self.trainers, self.replicas, versions)

    def needed(self) -> int:
        """Bytes of memory that the largest measurement takes."""
        slots = 2 if "swap" in self.modes else 1
        each = max(model.nbytes for model in self.models())
        return each * (2 + self.trainers + self.replicas * (1 + slots))


def run(case: PushCase, *, timeout: float = 600.0) -> PushResult:
    """Measure; VerificationError where a byte is wrong, RunError without the memory."""
    needed, available = case.needed(), memory.available()
    if needed > available:
        message = (
            f"{format_size(needed)} of memory are needed, {format_size(available)} are "
            "available: choose a smaller --total"
        )
        raise RunError(message)
    rows = [_measure(job, case, timeout) for job in case.jobs()]
    parameters = {
        "total": case.total,
        "tensors": case.small_tensors if case.small else case.tensors,
        "trainers": case.trainers,
        "replicas": case.replicas,
        "repetitions": case.repetitions,
        "warmup": case.warmup,
    }
    verified = sum(row.verified for row in rows)
    return PushResult(parameters, verified, rows, _small_factor(rows))


def _small_factor(rows: list[PushRow]) -> dict[str, float]:
    one = {row.mode: row.visible.p50 for row in rows if row.case == "one"}
    return {
        row.mode: row.visible.p50 / one[row.mode] for row in rows if row.case == "small"
    }


def _measure(job: Job, case: PushCase, timeout: float) -> PushRow:
    with Processes() as started:
        return _Director(started, job, timeout).run(case.warmup)


class _Director:
    """Tells trainer ranks and generators when; keeps what they measured."""

    def __init__(self, started: Processes, job: Job, timeout: float) -> None:
        self._started: Final = started
        self._job: Final = job
        self._timeout: Final = timeout
        self._trainers: list[Child] = []
        self._generators: list[Child] = []
        self._pushed: Final[list[list[Pushed]]] = []
        self._received: Final[list[list[Received]]] = []

    def run(self, warmup: int) -> PushRow:
        """Carry all versions out; return the row of those after the warm-up."""
        self._open()
        for _ in range(self._job.versions):
            self._push()
        everyone = self._trainers + self._generators
        self._tell(everyone)
        kept: list[Kept] = self._hear(everyone)
        count = len(self._trainers)
        return self._row(warmup, kept[:count], kept[count:])

    def _open(self) -> None:
        job, start = self._job, self._started.start
        first = start("trainer 0", train, job, 0, "tcp://127.0.0.1:0")
        (address,) = self._hear([first])
        others = [
            start(f"trainer {rank}", train, job, rank, address)
            for rank in range(1, job.trainers)
        ]
        self._hear(others)
        self._trainers = [first, *others]
        self._generators = [
            start(f"generator {number}", generate, job, number, address)
            for number in range(job.replicas)
        ]
        self._hear(self._trainers)

    def _push(self) -> None:
        """One version: everything is in place before the trainers are told to push."""
        self._tell(self._generators)
        self._hear(self._generators)
        self._tell(self._trainers)
        self._hear(self._trainers)
        self._tell(self._trainers)
        said = self._hear(self._trainers + self._generators)
        count = len(self._trainers)
        self._pushed.append(said[:count])
        self._received.append(said[count:])

    def _tell(self, children: list[Child]) -> None:
        for child in children:
            child.tell("go on")

    def _hear(self, children: list[Child]) -> list[Any]:
        return self._started.gather(children, self._timeout)

    def _row(
        self, warmup: int, trainers: list[Kept], generators: list[Kept]
    ) -> PushRow:
        job = self._job
        rounds = list(zip(self._pushed, self._received, strict=True))[warmup:]
        visible = Spread.of(
            [max(r.visible for r in got) - _called(put) for put, got in rounds]
        )
        memcpy = Spread.of([put[0].memcpy for put, _ in rounds])
        nbytes = job.model.nbytes * job.replicas
        bandwidth = nbytes / visible.p50
        return PushRow(
            case=job.model.case,
            mode=job.mode,
            tensors=len(job.model.sizes),
            nbytes=job.model.nbytes,
            trainers=job.trainers,
            replicas=job.replicas,
            visible=visible,
            returned=Spread.of(
                [max(p.returned for p in put) - _called(put) for put, _ in rounds]
            ),
            switched=Spread.of([max(r.switched for r in got) for _, got in rounds]),
            memcpy=memcpy,
            bandwidth=bandwidth,
            ratio=bandwidth / (job.model.nbytes / memcpy.p50),
            trainer_gap=max(kept.gap for kept in trainers),
            generator_gap=max(kept.gap for kept in generators),
            collector_pause=max(kept.collector for kept in trainers + generators),
            trainer_rise=max(kept.rise for kept in trainers),
            generator_rise=max(kept.rise for kept in generators),
            verified=sum(kept.verified for kept in generators),
        )


def _called(pushed: list[Pushed]) -> float:
    return min(push.called for push in pushed)
