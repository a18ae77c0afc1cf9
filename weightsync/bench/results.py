"""What the cases measure: plain values, and the JSON that they become."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from weightsync.bench.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA: Final = 1
"""Changes when a field of the JSON changes its meaning."""

EMULATED: Final = (
    "THE GPUS ARE EMULATED: bytes are verified, but no time, bandwidth or ratio below "
    "says anything of any GPU"
)

UNSTEADY: Final = 1.5
"""Largest ratio of p90 and p50 of the memcpy that still means something."""


class Spread(msgspec.Struct, frozen=True):
    """Seconds of one thing that was repeated."""

    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Summarise; a percentile is a value that was measured (nearest rank)."""
        ordered = sorted(seconds)

        def rank(share: float) -> float:
            return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

        return cls(median(ordered), rank(0.9), rank(0.99), len(ordered))


class PutRow(msgspec.Struct, frozen=True, kw_only=True):
    """Put, signal and wait of one size.

    ``latency`` is one way of one put; ``burst`` one way of ``depth`` puts in flight.
    ``memcpy`` and ``memcpy_burst`` copy the same bytes in as many calls, on a GPU
    within it. Bandwidths are those of the burst, in bytes per second; ratios compare
    medians, 1 is as fast as memcpy. ``broadcast`` is one of NCCL to all ranks, and None
    on CPUs.
    """

    size: int
    depth: int
    latency: Spread
    memcpy: Spread
    burst: Spread
    memcpy_burst: Spread
    ratio: float
    bandwidth: float
    memcpy_bandwidth: float
    bandwidth_ratio: float
    broadcast: Spread | None = None


class PushRow(msgspec.Struct, frozen=True, kw_only=True):
    """Pushes of one state dict in one mode.

    ``visible``: seconds from the call of push until the last generator's receive has
    returned; ``returned``: until push has. ``switched`` is the part of a generator's
    switch. ``memcpy`` is one of the bytes that a replica receives, ``torch`` the same
    with torch's ``copy_`` of each piece, None on GPUs, where ``broadcast`` is one by
    NCCL of the same bytes to all ranks, and the copy one within a GPU. ``ratio`` is 1
    where the bytes become visible as fast as that memcpy moves them. Gaps are the
    longest pauses of the callers' event loops, warm-up included; ``collector_pause`` is
    the longest of Python's garbage collector, a part of them. Rises are bytes of
    resident memory above the windows.
    ``verified`` is bytes compared on generators.
    """

    case: Literal["model", "small", "one"]
    mode: str
    tensors: int
    nbytes: int
    trainers: int
    replicas: int
    visible: Spread
    returned: Spread
    switched: Spread
    memcpy: Spread
    torch: Spread | None
    bandwidth: float
    ratio: float
    trainer_gap: float
    generator_gap: float
    collector_pause: float
    trainer_rise: int
    generator_rise: int
    verified: int
    broadcast: Spread | None = None


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """Plans for one number of trainer ranks, each made in a fresh process.

    Seconds are of the CPU, on one thread. ``manifests`` is the bytes of those of all
    ranks on the wire, ``decoded`` the seconds to decode them. Then seconds, and bytes
    by which resident memory rose, decoded manifests included: for the plan of the
    trainer rank that sends most, the plan of one generator rank, the leader's check,
    and the sum of what each rank sends (``summed``). ``largest_sender`` is by the mean
    of all. ``verified`` is bytes whose runs were compared with plain indexing.
    """

    trainers: int
    manifests: int
    decoded: float
    trainer: float
    trainer_rise: int
    trainer_runs: int
    trainer_rows: int
    generator: float
    generator_rise: int
    generator_runs: int
    generator_rows: int
    checked: float
    checked_rise: int
    summed: float
    largest_sender: float
    verified: int


class EmulatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the emulator does, repeated.

    ``beside`` is what it is compared with: a plain import of torch, a memcpy. ``value``
    is of medians and ``best_value`` of the shortest: seconds on top for a start, memcpy
    by put (1 is as fast) for a put, seconds for an all-reduce. ``asked`` is the least
    for a put and the most for the others.
    """

    name: str
    measured: Spread
    best: float
    beside: Spread | None
    value: float
    best_value: float
    asked: float
    met: bool


class BackendRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation, issued by weightsync-nccl2 and by torch's nccl2.

    Seconds of the host from the call until it returns. ``ratio`` is of medians and
    ``best_ratio`` of the shortest, ours by theirs; ``asked`` is the most. Of the ratios
    of the medians of two batches that follow each other, all but the lowest and the
    highest tenth lie from ``low`` to ``high``.
    """

    name: str
    ours: Spread
    theirs: Spread
    ratio: float
    low: float
    high: float
    best_ratio: float
    asked: float
    met: bool


class ElasticRow(msgspec.Struct, frozen=True):
    """One thing that happens to a pool, repeated.

    ``value`` is a median in seconds, or the ratio of the medians of ``measured`` and
    ``beside``. ``asked`` is the most, for every one of the seconds, or for the ratio.
    """

    name: str
    unit: Literal["seconds", "ratio"]
    measured: Spread
    beside: Spread | None
    value: float
    asked: float | None
    met: bool


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated job of so many ``minutes``, in which replicas failed.

    CPU seconds are those of the leader: to start with everybody, for each replica that
    joined then, for the first push, which agrees on the plans, and for each push after;
    ``hub_cpu`` of a hub for a push. Messages are those that came and went for a push.
    ``quiet``: seconds of pushes beside which nothing went on; ``died``, ``frozen`` and
    ``joined``: of those in which a replica did, until the leader had noticed, or all
    had planned. Store: calls to start, for a replica that joins, and for each simulated
    second after the start. ``kept_first`` and ``kept_last``: bytes of what the leader
    knows after the first push and at the end.
    """

    minutes: float
    failures: int
    start_cpu: float
    join_cpu: float
    first: float
    first_cpu: float
    push_cpu: Spread
    messages: int
    hub_messages: int
    hub_cpu: float
    quiet: Spread | None
    died: Spread | None
    frozen: Spread | None
    joined: Spread | None
    store_start: int
    store_join: int
    store_rate: float
    kept_first: int
    kept_last: int
    verified: int


class GpuFigures(msgspec.Struct, frozen=True):
    """What GPUs were doing; None is what could not be measured.

    ``kernels`` that one burst of puts launched, or a push on the rank with most of
    them. ``overlap``: seconds of a burst, or until a push is visible, beside a
    computation that lasts longer, by those alone; 1 is undisturbed. ``emulated`` GPUs
    are none: no time or ratio of the result means anything.
    """

    emulated: bool
    kernels: int | None
    overlap: float | None


class PutResult(msgspec.Struct, frozen=True, tag="put-signal", tag_field="benchmark"):
    """One run of ``put-signal``; ``verified`` is bytes compared by all ranks."""

    parameters: dict[str, int]
    verified: int
    rows: list[PutRow]
    gpu: GpuFigures | None = None


class PushResult(msgspec.Struct, frozen=True, tag="push", tag_field="benchmark"):
    """One run of ``push``.

    ``small_factor``: by mode, how many times longer many small tensors took than one
    tensor of the same bytes. ``layout``: who cuts the tensors.
    """

    parameters: dict[str, int]
    verified: int
    rows: list[PushRow]
    small_factor: dict[str, float]
    layout: Literal["same", "rows", "columns"] = "same"
    gpu: GpuFigures | None = None


class PlanResult(msgspec.Struct, frozen=True, tag="plan", tag_field="benchmark"):
    """One run of ``plan``."""

    parameters: dict[str, int]
    verified: int
    rows: list[PlanRow]


class EmulatorResult(
    msgspec.Struct, frozen=True, tag="emulator", tag_field="benchmark"
):
    """One run of ``emulator``; its figures say nothing of any GPU."""

    parameters: dict[str, int]
    verified: int
    rows: list[EmulatorRow]


class BackendResult(msgspec.Struct, frozen=True, tag="backend", tag_field="benchmark"):
    """One run of ``backend``; its figures say nothing of any GPU."""

    parameters: dict[str, int]
    verified: int
    rows: list[BackendRow]


class ElasticResult(msgspec.Struct, frozen=True, tag="elastic", tag_field="benchmark"):
    """One run of ``elastic``; ``verified`` is bytes compared by the replica A."""

    parameters: dict[str, int]
    verified: int
    rows: list[ElasticRow]


class PoolResult(msgspec.Struct, frozen=True, tag="pool", tag_field="benchmark"):
    """One run of ``pool``; ``verified`` is outcomes and versions that were compared."""

    parameters: dict[str, int]
    verified: int
    rows: list[PoolRow]


Result = (
    PutResult
    | PushResult
    | PlanResult
    | EmulatorResult
    | BackendResult
    | ElasticResult
    | PoolResult
)


class Report(msgspec.Struct, frozen=True):
    """Everything that one call of the command measured."""

    environment: Environment
    warnings: list[str]
    results: list[Result]
    schema: int = SCHEMA


def emulated(result: Result) -> list[str]:
    """Say loudly where GPUs are none."""
    gpu = result.gpu if isinstance(result, PutResult | PushResult) else None
    return [EMULATED] if gpu is not None and gpu.emulated else []


def unsteady(result: Result) -> list[str]:
    """Name the rows whose memcpy varied so much that the machine was not quiet."""
    found: list[str] = []
    if isinstance(result, PlanResult | BackendResult | ElasticResult | PoolResult):
        return found
    for row in result.rows:
        spread = _memcpy(row)
        if spread is not None and spread.p90 > UNSTEADY * spread.p50:
            found.append(_name(row))
    if not found:
        return []
    message = (
        f"memcpy itself varied by more than {UNSTEADY} (p90 to p50) at "
        f"{', '.join(found)}: the machine was not quiet"
    )
    return [message]


def _memcpy(row: PutRow | PushRow | EmulatorRow) -> Spread | None:
    if isinstance(row, PutRow):
        return row.memcpy_burst
    if isinstance(row, PushRow):
        return row.memcpy
    return row.beside if row.name == "put" else None


def _name(row: PutRow | PushRow | EmulatorRow) -> str:
    if isinstance(row, PutRow):
        return f"{row.size} B"
    if isinstance(row, EmulatorRow):
        return row.name
    return f"{row.case}/{row.mode}"
