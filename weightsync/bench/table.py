"""One table for people: with rich on a terminal, else as plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the heads of the columns, the cells, and lines below."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]

    def plain(self) -> str:
        """Align the columns with spaces."""
        lines = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.rjust(width) for cell, width in zip(line, widths, strict=True)
            )
            for line in lines
        ]
        return "\n".join([self.title, *text, *self.notes])


def show(lines: Iterable[str], tables: Sequence[Table], stream: TextIO) -> None:
    """Write to a stream."""
    if stream.isatty() and _show_rich(lines, tables, stream):
        return
    for line in lines:
        print(line, file=stream)
    for each in tables:
        print(f"\n{each.plain()}", file=stream)


def _show_rich(lines: Iterable[str], tables: Sequence[Table], stream: TextIO) -> bool:
    """Write with rich; False where it is not installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table as RichTable
    except ImportError:
        return False
    console = Console(file=stream, highlight=False)
    unbounded = console.options.update(max_width=1000)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    for each in tables:
        drawn = RichTable(
            title=each.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        for head in each.heads:
            drawn.add_column(head, justify="right", no_wrap=True)
        for row in each.rows:
            drawn.add_row(*row)
        console.print()
        if Measurement.get(console, unbounded, drawn).maximum > console.width:
            # Cut or wrapped numbers are worse than long lines.
            print(each.plain(), file=stream)
            continue
        console.print(drawn)
        for note in each.notes:
            console.print(note, markup=False, soft_wrap=True)
    return True
