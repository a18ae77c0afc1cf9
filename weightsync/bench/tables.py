"""Results as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.results import (
    BackendResult,
    ElasticResult,
    EmulatorResult,
    PlanResult,
    PoolResult,
    PushResult,
    PutResult,
    PutRow,
)
from weightsync.bench.table import Table
from weightsync.bench.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.bench.environment import Environment
    from weightsync.bench.results import (
        BackendRow,
        ElasticRow,
        EmulatorRow,
        GpuFigures,
        PlanRow,
        PoolRow,
        PushRow,
        Result,
        Spread,
    )


def environment_lines(environment: Environment) -> list[str]:
    """Say where the figures come from."""
    found = environment
    machine = (found.cpu, f"{found.cores} cores", f"{format_size(found.memory)} memory")
    software = (f"Python {found.python}", f"torch {found.torch}")
    return [
        ", ".join((*machine, f"load {found.load:.2f}")),
        ", ".join((found.system, *software, f"weightsync {found.weightsync}")),
    ]


def table(result: Result) -> Table:
    """Turn a result into a table."""
    make: Callable[[Any], Table] = _TABLES[type(result)]
    return make(result)


def _gpu_notes(found: GpuFigures | None, what: str) -> list[str]:
    """Say what GPUs did meanwhile."""
    if found is None or found.emulated:
        return []
    kernels = "were not counted" if found.kernels is None else f": {found.kernels}"
    beside = "not measured" if found.overlap is None else f"{found.overlap:.2f}"
    return [
        "Memcpy: within one GPU, by its copy engine.",
        f"Kernels launched for {what}{' ' * (found.kernels is None)}{kernels}.",
        f"Beside a computation, by {what} alone: {beside}.",
    ]


def _put_table(result: PutResult) -> Table:
    heads = (
        *("size", "one way p50", "p99", "memcpy p50", "ratio"),
        *("in flight", "bandwidth", "memcpy", "ratio"),
        *(("broadcast p50",) if result.gpu else ()),
    )
    notes = [
        *_gpu_notes(result.gpu, "a burst"),
        "Ratio: 1 is as fast as a plain memcpy of the same bytes.",
        "In flight: the puts of the bandwidth figures.",
        f"{format_size(result.verified)} were compared and are right.",
    ]
    title = f"put, signal and wait between {result.parameters['ranks']} ranks"
    return Table(title, heads, [_put_cells(row) for row in result.rows], notes)


def _put_cells(row: PutRow) -> tuple[str, ...]:
    return (
        format_size(row.size),
        format_seconds(row.latency.p50),
        format_seconds(row.latency.p99),
        format_seconds(row.memcpy.p50),
        f"{row.ratio:.2f}",
        str(row.depth),
        format_rate(row.bandwidth),
        format_rate(row.memcpy_bandwidth),
        f"{row.bandwidth_ratio:.2f}",
        *((format_seconds(row.broadcast.p50),) if row.broadcast else ()),
    )


def _push_table(result: PushResult) -> Table:
    heads = (
        *("mode", "tensors", "bytes", "visible p50", "p99", "bandwidth"),
        *("memcpy p50", "ratio", "broadcast p50" if result.gpu else "torch p50"),
        *("loop gap", "of it gc", "memory rise"),
    )
    notes = [
        *_gpu_notes(result.gpu, "a push"),
        "Visible: from the call of push until receive has returned.",
        "Ratio: 1 is as fast as one memcpy of the same bytes.",
        "Torch: the same by Tensor.copy_ into memory that is there, in one process."
        if result.gpu is None
        else "Broadcast: of the same bytes, by NCCL, to all of these ranks.",
        "Loop gap, memory rise above the window: the worse of trainer and generator.",
        "Of it gc: the longest pause that Python's garbage collector made.",
    ]
    notes += [
        f"{mode}: many small tensors took {factor:.1f} times as long as one large."
        for mode, factor in result.small_factor.items()
    ]
    notes += [
        f"{row.mode}: push returned after {format_seconds(row.returned.p50)} (p50)."
        for row in result.rows
    ]
    notes.append(f"{format_size(result.verified)} were compared and are right.")
    return Table(
        _push_title(result), heads, [_push_cells(row) for row in result.rows], notes
    )


def _push_title(result: PushResult) -> str:
    found = result.parameters
    title = f"push from {found['trainers']} trainer ranks to {found['replicas']} "
    title += f"replicas of {found['ranks']} ranks"
    if result.layout == "rows":
        title += ", each tensor cut by rows between the trainer ranks"
    elif result.layout == "columns":
        row_bytes = format_size(found["row_bytes"])
        title += f", each tensor cut by columns between those, rows of {row_bytes}"
    title += ", float32 to bfloat16" if found["cast"] else ""
    return f"{title}, each version kept for replays" if found["replay"] else title


def _push_cells(row: PushRow) -> tuple[str, ...]:
    beside = row.torch or row.broadcast
    return (
        row.mode,
        str(row.tensors),
        format_size(row.nbytes),
        format_seconds(row.visible.p50),
        format_seconds(row.visible.p99),
        format_rate(row.bandwidth),
        format_seconds(row.memcpy.p50),
        f"{row.ratio:.2f}",
        format_seconds(beside.p50) if beside else "-",
        format_seconds(max(row.trainer_gap, row.generator_gap)),
        format_seconds(row.collector_pause),
        format_size(max(row.trainer_rise, row.generator_rise)),
    )


def _plan_table(result: PlanResult) -> Table:
    heads = (
        *("trainers", "manifests", "decoded", "trainer's plan", "memory", "runs"),
        *("generator's plan", "memory", "runs", "check", "largest sender"),
    )
    first, last = result.rows[0], result.rows[-1]
    seconds, runs = last.trainer / first.trainer, last.trainer_runs / first.trainer_runs
    growth = f"its seconds times {seconds:.2f}, its runs times {runs:.2f}"
    compared = format_size(result.verified)
    notes = [
        "Each in a fresh process; seconds of the CPU, on one thread.",
        "Memory: how far it rises, the decoded manifests of all ranks included.",
        "Trainer's plan: of the rank that sends most, here by the mean of all ranks.",
        f"From {first.trainers} to {last.trainers} trainers: {growth}.",
        f"The runs of {compared} were compared with plain indexing and are right.",
    ]
    found = result.parameters
    title = (
        f"plans of {found['tensors']} tensors of {format_size(found['nbytes'])} to "
        f"{found['generators']} generators"
    )
    return Table(title, heads, [_plan_cells(row) for row in result.rows], notes)


def _plan_cells(row: PlanRow) -> tuple[str, ...]:
    return (
        str(row.trainers),
        format_size(row.manifests),
        format_seconds(row.decoded),
        format_seconds(row.trainer),
        format_size(row.trainer_rise),
        str(row.trainer_runs),
        format_seconds(row.generator),
        format_size(row.generator_rise),
        str(row.generator_runs),
        format_seconds(row.checked),
        f"{row.largest_sender:.3f}",
    )


def _emulator_table(result: EmulatorResult) -> Table:
    heads = ("what", "p50", "p99", "best", "beside p50", "figure", "best", "asked", "")
    size = format_size(result.parameters["size"])
    notes = [
        "These are figures of the emulator on this machine's CPUs, not of any GPU.",
        "Start: a program that uses a GPU; beside it, one that imports torch.",
        f"Put: {size}, beside it a memcpy of the same bytes; 1.00 is as fast.",
        "All-reduce: four bytes, from the call until the stream has done it.",
        f"{format_size(result.verified)} were compared and are right.",
    ]
    rows = [_emulator_cells(row) for row in result.rows]
    return Table("the emulator of CUDA and NCCL, two ranks", heads, rows, notes)


def _emulator_cells(row: EmulatorRow) -> tuple[str, ...]:
    def figure(value: float) -> str:
        return f"{value:.2f}" if row.name == "put" else format_seconds(value)

    return (
        row.name,
        format_seconds(row.measured.p50),
        format_seconds(row.measured.p99),
        format_seconds(row.best),
        "" if row.beside is None else format_seconds(row.beside.p50),
        figure(row.value),
        figure(row.best_value),
        ("at least " if row.name == "put" else "under ") + figure(row.asked),
        "met" if row.met else "not met",
    )


def _backend_table(result: BackendResult) -> Table:
    heads = (
        *("what", "ours p50", "p99", "nccl2 p50", "p99"),
        *("ratio", "range", "best", "asked", ""),
    )
    notes = [
        "From the call until it returns: figures of the host, not of any GPU.",
        "Ratio: 1.00 is as long as torch's own nccl2 takes, less is shorter.",
        "Range: of the ratios of single batches, without the outer tenths.",
        "Several puts: one call of ours, as many calls of torch's.",
        f"{format_size(result.verified)} were compared and are right.",
    ]
    rows = [_backend_cells(row) for row in result.rows]
    return Table("issuing small operations, two ranks", heads, rows, notes)


def _backend_cells(row: BackendRow) -> tuple[str, ...]:
    return (
        row.name,
        format_seconds(row.ours.p50),
        format_seconds(row.ours.p99),
        format_seconds(row.theirs.p50),
        format_seconds(row.theirs.p99),
        f"{row.ratio:.2f}",
        f"{row.low:.2f} - {row.high:.2f}",
        f"{row.best_ratio:.2f}",
        f"at most {row.asked:.2f}",
        "met" if row.met else "not met",
    )


def _elastic_table(result: ElasticResult) -> Table:
    heads = ("what", "p50", "p90", "p99", "count", "beside p50", "ratio", "asked", "")
    notes = [
        "Killed, frozen: from that moment in a push until it returns on all trainers.",
        "B joins: from making its Generator, beside pushes to A.",
        "To A: from the call of push until A has returned from receive.",
        "A stranger: a process of no pool, with the memory of B and its CPU seconds.",
        "By the stranger: what it costs A beyond the cores that B takes.",
        f"{format_size(result.verified)} were compared and are right.",
    ]
    size = format_size(result.parameters["size"])
    title = f"replicas that die, freeze and join, a model of {size}"
    return Table(title, heads, [_elastic_cells(row) for row in result.rows], notes)


def _elastic_cells(row: ElasticRow) -> tuple[str, ...]:
    def figure(value: float) -> str:
        return f"{value:.2f}" if row.unit == "ratio" else format_seconds(value)

    asked = "" if row.asked is None else f"under {figure(row.asked)}"
    return (
        row.name,
        format_seconds(row.measured.p50),
        format_seconds(row.measured.p90),
        format_seconds(row.measured.p99),
        str(row.measured.count),
        "" if row.beside is None else format_seconds(row.beside.p50),
        f"{row.value:.2f}" if row.unit == "ratio" else "",
        asked,
        "" if row.asked is None else "met" if row.met else "not met",
    )


def _pool_table(result: PoolResult) -> Table:
    found = result.parameters
    (row,) = result.rows
    title = (
        f"{found['trainers']} trainer ranks, {found['replicas']} replicas of "
        f"{found['ranks']} ranks, {found['pushes']} pushes in {row.minutes:.1f} "
        f"simulated minutes, {row.failures} failures"
    )
    notes = [
        "Leader: CPU seconds of the real code, which pass on the simulated clock.",
        "Frozen: until its lease of 10 s ends. Joins: until all have planned.",
        f"All {result.verified} outcomes and versions are as they must be.",
    ]
    return Table(title, ("what", "figure"), _pool_rows(row), notes)


def _pool_rows(row: PoolRow) -> list[tuple[str, ...]]:
    kept = f"{format_size(row.kept_first)}, {format_size(row.kept_last)}"
    return [
        ("start of all: leader", format_seconds(row.start_cpu)),
        ("a replica joins: leader", format_seconds(row.join_cpu)),
        ("first push", format_seconds(row.first)),
        ("first push: leader", format_seconds(row.first_cpu)),
        ("later push: leader p50", format_seconds(row.push_cpu.p50)),
        ("later push: leader p99", format_seconds(row.push_cpu.p99)),
        ("later push: messages of the leader", str(row.messages)),
        ("later push: messages of a hub", str(row.hub_messages)),
        ("later push: a hub", format_seconds(row.hub_cpu)),
        ("quiet push p50, p99", _pool_spread(row.quiet)),
        ("push while a replica dies", _pool_spread(row.died)),
        ("push while a replica is frozen", _pool_spread(row.frozen)),
        ("push while a replica joins", _pool_spread(row.joined)),
        ("store: calls to start", str(row.store_start)),
        ("store: calls of a replica that joins", str(row.store_join)),
        ("store: calls a second", f"{row.store_rate:.2f}"),
        ("leader knows, after the first push and at the end", kept),
    ]


def _pool_spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    times = f"{format_seconds(spread.p50)}, {format_seconds(spread.p99)}"
    return f"{times} ({spread.count})"


_TABLES: Final[dict[type[Result], Callable[[Any], Table]]] = {
    PutResult: _put_table,
    PushResult: _push_table,
    PlanResult: _plan_table,
    EmulatorResult: _emulator_table,
    BackendResult: _backend_table,
    ElasticResult: _elastic_table,
    PoolResult: _pool_table,
}
