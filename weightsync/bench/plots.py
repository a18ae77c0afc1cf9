"""Results as a picture: time and bandwidth, memcpy beside. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.results import PlanResult, PushResult, PutResult
from weightsync.bench.units import format_size
from weightsync.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightsync.bench.results import Result

SUFFIXES: Final = (".png", ".svg")
PUT: Final = "#1f6fb4"
MEMCPY: Final = "#8a8a8a"


def check_matplotlib() -> None:
    """Raise UnsupportedError where pictures cannot be drawn; before measuring."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install 'weightsync[cli]'")


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw two panels for each result: time above, bandwidth below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(6.4 * len(results), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(results), squeeze=False)
    for column, result in enumerate(results):
        above, below = panels[0][column], panels[1][column]
        if isinstance(result, PutResult):
            _draw_put(result, above, below)
        elif isinstance(result, PlanResult):
            _draw_plan(result, above, below)
        elif isinstance(result, PushResult):
            _draw_push(result, above, below)
    figure.savefig(path, dpi=120)


def _draw_put(result: PutResult, above: Any, below: Any) -> None:
    rows = result.rows
    sizes = [row.size for row in rows]
    micros = [
        ("put + signal + wait, p50", PUT, "-", [row.latency.p50 for row in rows]),
        ("p99", PUT, ":", [row.latency.p99 for row in rows]),
        ("memcpy, p50", MEMCPY, "-", [row.memcpy.p50 for row in rows]),
    ]
    for label, color, style, seconds in micros:
        above.plot(sizes, [s * 1e6 for s in seconds], style, color=color, label=label)
    above.set(title="Latency, one way", ylabel="microseconds", yscale="log")
    rates = [
        ("put", PUT, [row.bandwidth for row in rows]),
        ("memcpy", MEMCPY, [row.memcpy_bandwidth for row in rows]),
    ]
    for label, color, rate in rates:
        below.plot(sizes, [r / 1e9 for r in rate], color=color, label=label)
    below.set(title="Bandwidth, several in flight", ylabel="GB/s", xlabel="size")
    for panel in (above, below):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
        panel.grid(visible=True, alpha=0.3)
        panel.legend()


def _draw_push(result: PushResult, above: Any, below: Any) -> None:
    rows = result.rows
    names = [f"{row.mode}\n{row.tensors} x {row.case}" for row in rows]
    places = range(len(rows))
    _bars(
        above,
        ("push to visible", [row.visible.p50 * 1e3 for row in rows]),
        ("one memcpy", [row.memcpy.p50 * 1e3 for row in rows]),
    )
    above.set(title="Push of a state dict", ylabel="milliseconds")
    _bars(
        below,
        ("push to visible", [row.bandwidth / 1e9 for row in rows]),
        ("one memcpy", [row.nbytes / row.memcpy.p50 / 1e9 for row in rows]),
    )
    below.set(title="Bandwidth", ylabel="GB/s")
    for panel in (above, below):
        panel.set_xticks(places, names)
        panel.grid(visible=True, axis="y", alpha=0.3)
        panel.legend()


def _draw_plan(result: PlanResult, above: Any, below: Any) -> None:
    rows = result.rows
    ranks = [row.trainers for row in rows]
    lines = [
        (above, "plan of a trainer", PUT, "-", [row.trainer for row in rows]),
        (above, "plan of a generator", PUT, ":", [row.generator for row in rows]),
        (above, "check", MEMCPY, "-", [row.checked for row in rows]),
        (below, "of a trainer", PUT, "-", [row.trainer_rise / 2**20 for row in rows]),
        (below, "of a generator", PUT, ":", [r.generator_rise / 2**20 for r in rows]),
    ]
    for panel, label, color, style, values in lines:
        panel.plot(ranks, values, style, color=color, label=label, marker=".")
    above.set(title="Plans", ylabel="seconds")
    below.set(title="Memory, manifests included", ylabel="MiB", xlabel="trainer ranks")
    for panel in (above, below):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ranks, [str(count) for count in ranks])
        panel.set_ylim(bottom=0)
        panel.grid(visible=True, alpha=0.3)
        panel.legend()


def _bars(
    panel: Any,
    ours: tuple[str, list[float]],
    memcpy: tuple[str, list[float]],
) -> None:
    for shift, color, (label, values) in ((-0.2, PUT, ours), (0.2, MEMCPY, memcpy)):
        places = [index + shift for index in range(len(values))]
        panel.bar(places, values, 0.4, color=color, label=label)
