"""What a plan amounts to: bytes of each pair and rank, puts, and the time predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from weightsync.cli.placing import place
from weightsync.fit import check
from weightsync.plan import column_plans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightsync.cli.layouts import Layout, Rule
    from weightsync.cli.models import ModelTensor
    from weightsync.plan import Plan
    from weightsync.spec import Manifest


class PairTraffic(msgspec.Struct, frozen=True):
    """What one trainer rank puts to one generator rank.

    A run is one call of put; each of its ``rows`` is contiguous. ``casts`` of the runs
    are converted first, and count in bytes of the generator's dtype.
    """

    trainer: int
    generator: int
    nbytes: int
    runs: int
    rows: int
    casts: int


class Share(msgspec.Struct, frozen=True):
    """How bytes are spread over the ranks of one side.

    ``ideal`` is the total, spread evenly over all ranks; ``ratio`` the largest by it.
    """

    ranks: list[int]
    ideal: float
    largest: int
    largest_rank: int
    ratio: float

    @classmethod
    def of(cls, nbytes: Sequence[int]) -> Share:
        """Summarise the bytes of all ranks."""
        ideal = sum(nbytes) / len(nbytes)
        largest = max(nbytes)
        rank = nbytes.index(largest)
        return cls(list(nbytes), ideal, largest, rank, largest / ideal if ideal else 1)


class Prediction(msgspec.Struct, frozen=True):
    """How long the links need; bandwidths are bytes per second of one rank.

    ``seconds`` is the longer of the largest sender's bytes by the send bandwidth and
    the largest receiver's by the receive bandwidth, of those that were given.
    """

    send_bandwidth: float | None
    receive_bandwidth: float | None
    seconds: float


class Side(msgspec.Struct, frozen=True):
    """One side: where its layout was read, and its mesh."""

    source: str
    mesh: dict[str, int]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``weightsync plan`` finds; its ``--json``.

    ``model_nbytes`` counts tied tensors once; ``nbytes`` is everything that is put,
    copies for several generator ranks included.
    """

    model: str
    tensors: int
    model_nbytes: int
    trainers: Side
    generators: Side
    nbytes: int
    runs: int
    rows: int
    casts: int
    sent: Share
    received: Share
    prediction: Prediction | None
    notes: list[str]
    pairs: list[PairTraffic]


class Bandwidths(NamedTuple):
    """Of the links of one rank, in bytes per second, where known."""

    send: float | None = None
    receive: float | None = None

    def predict(self, sent: Share, received: Share) -> Prediction | None:
        """Divide; None where neither is known."""
        seconds = [
            share.largest / bandwidth
            for share, bandwidth in ((sent, self.send), (received, self.receive))
            if bandwidth is not None
        ]
        return Prediction(self.send, self.receive, max(seconds)) if seconds else None


class Subject(NamedTuple):
    """What is planned."""

    model_source: str
    model: Sequence[ModelTensor]
    trainers: Layout
    generators: Layout


def summarize(subject: Subject, bandwidths: Bandwidths) -> Summary:
    """Place the model on both sides, check that they fit, plan, and add up.

    Raises PlanError where the layouts do not fit the model or each other.
    """
    trainers = place(subject.trainers, subject.model)
    generators = place(subject.generators, subject.model)
    where = subject.generators.source
    check(trainers.manifests, generators.manifests, replica_name=where, cast=True)
    pairs = list(_traffic(trainers.manifests, generators.manifests))
    sent = Share.of(_by_rank(pairs, "trainer", subject.trainers.ranks))
    received = Share.of(_by_rank(pairs, "generator", subject.generators.ranks))
    return Summary(
        model=subject.model_source,
        tensors=len(subject.model),
        model_nbytes=sum([tensor.nbytes for tensor in subject.model]),
        trainers=Side(subject.trainers.source, dict(subject.trainers.mesh)),
        generators=Side(where, dict(subject.generators.mesh)),
        nbytes=sum(sent.ranks),
        runs=sum([pair.runs for pair in pairs]),
        rows=sum([pair.rows for pair in pairs]),
        casts=sum([pair.casts for pair in pairs]),
        sent=sent,
        received=received,
        prediction=bandwidths.predict(sent, received),
        notes=[_note(rule) for rule in (*trainers.unused, *generators.unused)],
        pairs=pairs,
    )


def _traffic(
    trainers: Sequence[Manifest], generators: Sequence[Manifest]
) -> Iterator[PairTraffic]:
    # One generator rank after the other: all runs of a large job would fill memory.
    for plan in column_plans(trainers, generators):
        yield from [_pair(plan, pair) for pair in plan.pairs]


def _pair(plan: Plan, pair: tuple[int, int]) -> PairTraffic:
    casts = len(plan.casts(*pair))
    runs = len(plan.runs(*pair)) + casts
    return PairTraffic(*pair, plan.nbytes(*pair), runs, plan.rows(*pair), casts)


def _by_rank(
    pairs: Iterable[PairTraffic], side: Literal["trainer", "generator"], ranks: int
) -> list[int]:
    nbytes = [0] * ranks
    for pair in pairs:
        nbytes[getattr(pair, side)] += pair.nbytes
    return nbytes


def _note(rule: Rule) -> str:
    return f"{rule.where} matches no tensor that no earlier rule matches"
