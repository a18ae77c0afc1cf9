"""Directs one measurement of case ``push``: tells its ranks when, and sums up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.push_ranks import Job, Kept, Pushed, Received, generate, train
from weightsync.bench.results import GpuFigures, PushRow, Spread

if TYPE_CHECKING:
    from weightsync.bench.runner import Child, Processes

Measured = tuple[PushRow, GpuFigures | None]


class Director:
    """Tells trainer ranks and generators when; keeps what they measured."""

    def __init__(self, started: Processes, job: Job, timeout: float) -> None:
        self._started: Final = started
        self._job: Final = job
        self._timeout: Final = timeout
        self._trainers: list[Child] = []
        self._generators: list[Child] = []
        self._pushed: Final[list[list[Pushed]]] = []
        self._received: Final[list[list[Received]]] = []

    def run(self, warmup: int) -> Measured:
        """Carry all versions out; return the row of those after the warm-up.

        And what GPUs did, if there are any.
        """
        self._open()
        for _ in range(self._job.versions):
            self._push()
        everyone = self._trainers + self._generators
        self._tell(everyone)
        kept: list[Kept] = self._hear(everyone)
        count = len(self._trainers)
        return self._row(warmup, kept[:count], kept[count:]), self._figures(kept)

    def _figures(self, kept: list[Kept]) -> GpuFigures | None:
        if self._job.engine == "shm":
            return None
        kernels = [each.kernels for each in kept if each.kernels is not None]
        emulated = any(each.emulated for each in kept)
        return GpuFigures(emulated, max(kernels, default=None), None)

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
            start(f"generator {number}.{rank}", generate, job, number, rank, address)
            for number in range(job.replicas)
            for rank in range(job.cut.columns)
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
        memcpy = Spread.of([put[0].copies.memcpy for put, _ in rounds])
        torch = [put[0].copies.torch for put, _ in rounds]
        copies = [seconds for seconds in torch if seconds is not None]
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
            torch=Spread.of(copies) if copies else None,
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
