"""Case ``plan``: what plans of a model of a trillion parameters take, without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from weightsync.bench.plan_model import MoeModel, generators, trainers
from weightsync.bench.plan_ranks import PlanJob, Planned, What, measure
from weightsync.bench.results import PlanResult, PlanRow
from weightsync.bench.runner import Processes
from weightsync.bench.units import parse_count, parse_counts
from weightsync.cli.placing import place
from weightsync.together import Together

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from weightsync.spec import Manifest

DESCRIPTION: Final = """\
Who sends what, for a mixture of experts of a trillion parameters (the published shapes
of Kimi-K2) and hundreds of ranks, from their manifests alone. Trainers use FSDP over
expert parallel, generators tensor parallel over expert parallel. Seconds and memory of
one trainer rank, one generator rank and the leader, and how even the load is."""

RANKS: Final = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What to measure: a model, numbers of trainer ranks, and the meshes."""

    ranks: tuple[int, ...] = RANKS
    expert_parallel: int = 32
    generator_expert_parallel: int = 16
    tensor_parallel: int = 8
    model: MoeModel = field(default_factory=MoeModel)

    def check(self) -> None:
        """Raise ValueError where it cannot be measured."""
        for ranks in self.ranks:
            if ranks % self.expert_parallel:
                raise ValueError(
                    f"--trainers: {ranks} ranks cannot form groups of "
                    f"{self.expert_parallel}, as --expert-parallel says"
                )

    @property
    def generators(self) -> int:
        """Number of generator ranks."""
        return self.generator_expert_parallel * self.tensor_parallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    default = PlanCase()
    parser.set_defaults(make=_case)
    parser.add_argument(
        "--trainers",
        type=parse_counts,
        default=default.ranks,
        metavar="N,...",
        help=f"numbers of trainer ranks (default: {','.join(map(str, default.ranks))})",
    )
    for name, value, what in (
        (
            "expert-parallel",
            default.expert_parallel,
            "groups of trainers that share the experts",
        ),
        (
            "generator-expert-parallel",
            default.generator_expert_parallel,
            "groups of generators that share the experts",
        ),
        (
            "tensor-parallel",
            default.tensor_parallel,
            "generators in each of their groups",
        ),
        ("layers", default.model.num_hidden_layers, "layers of the model"),
        ("experts", default.model.n_routed_experts, "experts of each layer"),
    ):
        parser.add_argument(
            f"--{name}",
            type=parse_count,
            default=value,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )


def _case(found: argparse.Namespace) -> list[Any]:
    case = PlanCase(
        found.trainers,
        found.expert_parallel,
        found.generator_expert_parallel,
        found.tensor_parallel,
        MoeModel(num_hidden_layers=found.layers, n_routed_experts=found.experts),
    )
    case.check()
    return [case]


def run(case: PlanCase, *, timeout: float = 600.0) -> PlanResult:
    """Measure; VerificationError where a plan moves wrong bytes."""
    tensors = case.model.tensors()
    layout = generators(case.generator_expert_parallel, case.tensor_parallel)
    replica = _encode(place(layout, tensors).manifests)
    rows: list[PlanRow] = []
    for ranks in case.ranks:
        layout = trainers(ranks, case.expert_parallel)
        pushed = _encode(place(layout, tensors).manifests)
        rows.append(_Measuring(case, pushed, replica, timeout).row(ranks))
    parameters = {
        "tensors": len(tensors),
        "nbytes": sum([tensor.nbytes for tensor in tensors]),
        "generators": case.generators,
        "expert_parallel": case.expert_parallel,
        "generator_expert_parallel": case.generator_expert_parallel,
        "tensor_parallel": case.tensor_parallel,
    }
    verified = sum([row.verified for row in rows])
    return PlanResult(parameters, verified, rows)


class _Measuring:
    """The plans of one number of trainer ranks, each made in a fresh process."""

    def __init__(
        self, case: PlanCase, pushed: bytes, replica: bytes, timeout: float
    ) -> None:
        self._case = case
        self._manifests = pushed, replica
        self._timeout = timeout

    def row(self, ranks: int) -> PlanRow:
        """Measure the trainer rank that sends most, and a generator rank."""
        sent = self._measure("sent", 0)
        trainer = self._measure("trainer", _largest(sent.sent))
        generator = self._measure("generator", self._case.generators // 2)
        checked = self._measure("check", 0)
        return PlanRow(
            trainers=ranks,
            manifests=sum(map(len, self._manifests)),
            decoded=trainer.decoded,
            trainer=trainer.seconds,
            trainer_rise=trainer.rise,
            trainer_runs=trainer.runs,
            trainer_rows=trainer.rows,
            generator=generator.seconds,
            generator_rise=generator.rise,
            generator_runs=generator.runs,
            generator_rows=generator.rows,
            checked=checked.seconds,
            checked_rise=checked.rise,
            summed=sent.seconds,
            largest_sender=max(sent.sent) * ranks / sum(sent.sent),
            verified=trainer.verified + generator.verified,
        )

    def _measure(self, what: What, rank: int) -> Planned:
        with Processes() as started:
            job = PlanJob(what, rank, *self._manifests)
            child = started.start(what, measure, job)
            (planned,) = started.gather([child], self._timeout)
        return cast("Planned", planned)


def _encode(manifests: Iterable[Manifest]) -> bytes:
    return msgspec.msgpack.encode(Together.of(manifests))


def _largest(sent: Sequence[int]) -> int:
    return max(range(len(sent)), key=sent.__getitem__)
