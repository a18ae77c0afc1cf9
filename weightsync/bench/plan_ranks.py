"""The processes of the case ``plan``: each makes one plan, as a rank of a job does.

What it gets is the manifests of all ranks as they come off the wire.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import torch

from weightsync.bench.memory import Resident
from weightsync.bench.patterns import VerificationError
from weightsync.fit import check
from weightsync.plan import make_plan, sent_bytes
from weightsync.spec import ITEMSIZE
from weightsync.together import Together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from weightsync.bench.runner import Line
    from weightsync.plan import Plan, Run
    from weightsync.spec import Box, Manifest, TensorSpec

What = Literal["trainer", "generator", "check", "sent"]

MAX_ELEMENTS: Final = 1 << 24
"""Pieces of more elements are compared in their number of bytes only."""

COMPARED_NAMES: Final = 16
"""Of so many names of a pair every element is compared."""

ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class PlanJob:
    """What to do with the manifests, which are encoded as in a message."""

    what: What
    rank: int
    trainers: bytes
    generators: bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """What it took, in seconds of the CPU; ``rise`` is of resident memory.

    Planning uses one thread and waits for nothing, so these are the seconds that it
    takes on a quiet machine.
    """

    decoded: float
    seconds: float
    rise: int
    runs: int = 0
    rows: int = 0
    verified: int = 0
    sent: tuple[int, ...] = ()


def measure(_: Line, job: PlanJob) -> Planned:
    """Do it once, in a process that has done nothing else."""
    resident = Resident()
    began = time.process_time()
    trainers = _decode(job.trainers)
    generators = _decode(job.generators)
    decoded = time.process_time() - began
    began = time.process_time()
    if job.what == "check":
        check(trainers, generators, replica_name="bench")
        return Planned(decoded, time.process_time() - began, resident.rise())
    if job.what == "sent":
        sent = tuple(sent_bytes(trainers, generators))
        seconds = time.process_time() - began
        return Planned(decoded, seconds, resident.rise(), sent=sent)
    ranks = {job.what: job.rank}
    plan = make_plan(trainers, generators, **ranks)
    seconds, rise = time.process_time() - began, resident.rise()
    return Planned(
        decoded,
        seconds,
        rise,
        runs=sum([len(plan.runs(*pair)) for pair in plan.pairs]),
        rows=sum([plan.rows(*pair) for pair in plan.pairs]),
        verified=_verify(plan, trainers, generators),
    )


def _decode(manifests: bytes) -> tuple[Manifest, ...]:
    return msgspec.msgpack.decode(manifests, type=Together).manifests


# Compared with plain indexing


def _verify(
    plan: Plan, trainers: Sequence[Manifest], generators: Sequence[Manifest]
) -> int:
    """Compare the first, the middle and the last pair; return the bytes compared.

    Right where no piece has two holders among the trainers.
    """
    pairs = plan.pairs
    chosen = sorted({pairs[0], pairs[len(pairs) // 2], pairs[-1]})
    return sum([verify_pair(plan, trainers, generators, pair) for pair in chosen])


def verify_pair(
    plan: Plan,
    trainers: Sequence[Manifest],
    generators: Sequence[Manifest],
    pair: tuple[int, int],
) -> int:
    """Compare a pair with a reference; return the bytes of which each was compared.

    The number of bytes is compared over all names. Raises VerificationError.
    """
    held = {spec.name: (at, spec) for at, spec in enumerate(trainers[pair[0]].tensors)}
    runs: dict[int, list[Run]] = {}
    for run in plan.runs(*pair):
        runs.setdefault(run.source, []).append(run)
    expected, compared, names = 0, 0, 0
    for start, target in _packed(generators[pair[1]]):
        at, source = held.get(target.name, (0, None))
        nbytes = 0 if source is None else _common(source, target)
        expected += nbytes
        if source is None or nbytes == 0 or names == COMPARED_NAMES:
            continue
        if max(source.box.numel, target.box.numel) <= MAX_ELEMENTS:
            _compare(pair, source, target, [_shift(r, start) for r in runs.get(at, ())])
            compared += nbytes
            names += 1
    if expected != plan.nbytes(*pair):
        raise VerificationError(
            f"trainer rank {pair[0]} puts {plan.nbytes(*pair)} B to generator rank "
            f"{pair[1]}, expected {expected}"
        )
    return compared


def _packed(manifest: Manifest) -> Iterator[tuple[int, TensorSpec]]:
    """Each piece, and where it starts in a slot."""
    start = 0
    for spec in manifest.tensors:
        yield start, spec
        start += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT


def _common(source: TensorSpec, target: TensorSpec) -> int:
    both = source.box.intersect(target.box)
    return both.numel * ITEMSIZE[target.dtype]


def _shift(run: Run, start: int) -> Run:
    return run._replace(target_offset=run.target_offset - start)


def _compare(
    pair: tuple[int, int], source: TensorSpec, target: TensorSpec, runs: Sequence[Run]
) -> None:
    """Move the numbers of the elements of a source, by indexing and by the runs."""
    numbers = torch.arange(source.box.numel, dtype=torch.int32)
    expected = torch.full(target.box.sizes, -1, dtype=torch.int32)
    both = source.box.intersect(target.box)
    there = numbers.view(source.box.sizes)[_slices(both, source.box)]
    expected[_slices(both, target.box)] = there
    moved = torch.full((target.box.numel,), -1, dtype=torch.int32)
    where = f"{source.name!r} from trainer rank {pair[0]} to generator rank {pair[1]}"
    try:
        for run in runs:
            _move(run, numbers, moved, ITEMSIZE[target.dtype])
    except RuntimeError as error:
        raise VerificationError(f"a run of {where} leaves its piece") from error
    if not torch.equal(expected.flatten(), moved):
        raise VerificationError(f"the runs of {where} are not what indexing moves")


def _move(run: Run, source: Tensor, target: Tensor, itemsize: int) -> None:
    """Carry a run out on elements; torch raises RuntimeError outside of the memory."""
    shape = run.rows, run.row_bytes // itemsize
    strides = run.target_stride // itemsize, 1
    to = target.as_strided(shape, strides, run.target_offset // itemsize)
    strides = run.source_stride // itemsize, 1
    to.copy_(source.as_strided(shape, strides, run.source_offset // itemsize))


def _slices(part: Box, box: Box) -> tuple[slice, ...]:
    spans = zip(part.offsets, part.sizes, box.offsets, strict=True)
    return tuple([slice(at - first, at - first + n) for at, n, first in spans])
