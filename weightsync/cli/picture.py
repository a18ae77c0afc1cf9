"""A plan as a picture: bytes of each pair, trainer ranks by generator ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from weightsync.bench.units import format_size, parse_size
from weightsync.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync.cli.summary import Summary

SUFFIXES: Final = (".png", ".svg")
COLOR: Final = "#1f6fb4"


def check_matplotlib() -> None:
    """Raise UnsupportedError where pictures cannot be drawn; before planning."""
    if find_spec("matplotlib") is None:
        message = "--picture needs matplotlib: pip install 'weightsync[cli]'"
        raise UnsupportedError(message)


def draw(summary: Summary, path: Path) -> None:
    """Draw the matrix, with what each rank sends to its right and receives above it.

    Pairs with nothing to move stay white. Raises OSError where it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9.6, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        *(2, 2),
        sharex="col",
        sharey="row",
        gridspec_kw={"width_ratios": (4, 1), "height_ratios": (1, 4)},
    )
    (received, corner), (matrix, sent) = panels
    corner.set_axis_off()
    image, unit = _draw_matrix(summary, matrix)
    _draw_sent(summary, sent)
    _draw_received(summary, received)
    figure.colorbar(image, ax=panels, label=f"{unit} of a pair")
    total = format_size(summary.nbytes)
    figure.suptitle(f"{total} from trainer ranks to generator ranks")
    figure.savefig(path, dpi=120)


def _draw_matrix(summary: Summary, panel: Any) -> tuple[Any, str]:
    most = max([pair.nbytes for pair in summary.pairs], default=1)
    size, unit = _unit(most)
    nothing = float("nan")
    cells = [[nothing] * len(summary.received.ranks) for _ in summary.sent.ranks]
    for pair in summary.pairs:
        cells[pair.trainer][pair.generator] = pair.nbytes / size
    image = panel.imshow(
        *(cells, "viridis_r"), aspect="auto", interpolation="nearest", vmin=0
    )
    panel.set(xlabel="generator rank", ylabel="trainer rank")
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return image, unit


def _draw_sent(summary: Summary, panel: Any) -> None:
    size, unit = _unit(summary.sent.largest)
    nbytes = [each / size for each in summary.sent.ranks]
    panel.barh(range(len(nbytes)), nbytes, height=1.0, color=COLOR)
    panel.axvline(summary.sent.ideal / size, color="black", linestyle=":")
    panel.set(xlabel=f"{unit} sent; ideal dotted")


def _draw_received(summary: Summary, panel: Any) -> None:
    size, unit = _unit(summary.received.largest)
    nbytes = [each / size for each in summary.received.ranks]
    panel.bar(range(len(nbytes)), nbytes, width=1.0, color=COLOR)
    panel.axhline(summary.received.ideal / size, color="black", linestyle=":")
    panel.set(ylabel=f"{unit} received;\nideal dotted")


def _unit(nbytes: int) -> tuple[int, str]:
    """The unit that ``format_size`` would choose: its size and its name."""
    unit = format_size(nbytes).split()[1]
    return parse_size(f"1{unit}"), unit
