"""A plan's summary as text: lines and tables for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from weightsync.bench.table import Table
from weightsync.bench.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightsync.cli.summary import Share, Summary

MAX_ROWS: Final = 32
MAX_COLUMNS: Final = 8
"""A matrix of more trainer ranks or generator ranks is cut down to the top pairs."""

TOP_PAIRS: Final = 20


def lines(summary: Summary) -> Iterator[str]:
    """Say what was planned."""
    size = format_size(summary.model_nbytes)
    yield f"Model: {summary.model}, {summary.tensors} tensors, {size}"
    for role, side in (
        ("Trainers", summary.trainers),
        ("Generators", summary.generators),
    ):
        yield f"{role}: {side.source}, {_mesh(side.mesh)}"
    for note in summary.notes:
        yield f"Note: {note}."


def tables(summary: Summary) -> Iterator[Table]:
    """Say who sends what to whom, and how that is spread."""
    rows, columns = len(summary.sent.ranks), len(summary.received.ranks)
    small = rows <= MAX_ROWS and columns <= MAX_COLUMNS
    yield _matrix(summary) if small else _top_pairs(summary)
    yield _loads(summary)


def _mesh(mesh: Mapping[str, int]) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{math.prod(mesh.values())} ranks: {sizes}"


def _matrix(summary: Summary) -> Table:
    columns = range(len(summary.received.ranks))
    cells = {(p.trainer, p.generator): format_size(p.nbytes) for p in summary.pairs}
    rows = [
        (
            f"trainer {rank}",
            *[cells.get((rank, column), "-") for column in columns],
            format_size(sent),
        )
        for rank, sent in enumerate(summary.sent.ranks)
    ]
    received = [format_size(nbytes) for nbytes in summary.received.ranks]
    rows.append(("received", *received, format_size(summary.nbytes)))
    heads = ("", *[f"generator {column}" for column in columns], "sent")
    return Table("Bytes from each trainer rank to each generator rank", heads, rows, [])


def _top_pairs(summary: Summary) -> Table:
    pairs = sorted(summary.pairs, key=lambda pair: -pair.nbytes)[:TOP_PAIRS]
    rows: list[tuple[str, ...]] = [
        (
            str(pair.trainer),
            str(pair.generator),
            format_size(pair.nbytes),
            f"{pair.runs:,}",
            f"{pair.rows:,}",
        )
        for pair in pairs
    ]
    title = f"The {len(rows)} pairs with the most bytes, of {len(summary.pairs)}"
    heads = ("trainer", "generator", "bytes", "runs", "rows")
    return Table(title, heads, rows, ["All pairs and ranks: --json, --picture."])


def _loads(summary: Summary) -> Table:
    rows = [
        _load("sent by a trainer rank", summary.sent),
        _load("received by a generator rank", summary.received),
    ]
    heads = ("bytes", "largest", "rank", "smallest", "ideal", "largest by ideal")
    return Table("Load of the ranks", heads, rows, list(_notes(summary)))


def _load(name: str, share: Share) -> tuple[str, ...]:
    return (
        name,
        format_size(share.largest),
        str(share.largest_rank),
        format_size(min(share.ranks)),
        format_size(round(share.ideal)),
        f"{share.ratio:.3f}",
    )


def _notes(summary: Summary) -> Iterator[str]:
    yield "Ideal: everything that is put, spread evenly over the ranks of that side."
    mean = format_size(summary.nbytes // max(summary.runs, 1))
    row = format_size(summary.nbytes // max(summary.rows, 1))
    yield (
        f"Puts: {summary.runs:,} runs of {mean} on average, which have "
        f"{summary.rows:,} rows of {row}; {format_size(summary.nbytes)} in all."
    )
    if summary.casts:
        yield f"{summary.casts:,} of the runs are converted first: push with cast=True."
    if summary.prediction is None:
        yield "Give --send-bandwidth and --receive-bandwidth to have a time predicted."
    else:
        yield from _prediction(summary)


def _prediction(summary: Summary) -> Iterator[str]:
    found = summary.prediction
    if found is None:
        return
    terms = [
        f"{format_size(share.largest)} {verb} at {format_rate(bandwidth)}"
        for share, verb, bandwidth in (
            (summary.sent, "sent", found.send_bandwidth),
            (summary.received, "received", found.receive_bandwidth),
        )
        if bandwidth is not None
    ]
    formula = " and ".join(terms)
    if len(terms) > 1:
        formula = f"the longer of {formula}"
    yield f"Predicted: {format_seconds(found.seconds)}, {formula}."
