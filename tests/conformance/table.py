"""The table of docs/backend.md: what each test gave for torch's backend and for ours.

The counts are those of a run, the reasons those of ``backends``, and the rows the tests
that there are.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.conformance.backends import DIFFERENCES, FAULTS
from tests.conformance.results import LACKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.conformance.results import Record

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "backend.md"

BACKENDS: Final = ("nccl2", "weightsync-nccl2")

BEGIN: Final = "<!-- `make backend-table` writes from here -->"
END: Final = "<!-- to here -->"

Test = tuple[str, str]
"""A module and a function of it."""

Column = tuple[str, str]
"""A backend, and a minor version of torch."""

Cells = dict[Test, dict[Column, str]]


def subjects() -> dict[str, str]:
    """Return the first sentence of each module of tests."""
    return {
        path.stem: _docstring(ast.parse(path.read_text()))
        for path in sorted(HERE.glob("test_*.py"))
    }


def tests() -> list[Test]:
    """Return the tests that are run for each backend, in their order."""
    return [
        (path.stem, node.name)
        for path in sorted(HERE.glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if "backend" in {argument.arg for argument in node.args.args}
    ]


def cells_of(page: str) -> Cells:
    """Return what the table of a page shows."""
    cells: Cells = {}
    module, columns = "", list[Column]()
    for first, *others, _ in _lines_of(page):
        if not columns:
            columns = [_column(text) for text in others]
        elif first.startswith("**"):
            module = first.split("`")[-2]
        else:
            test = f"test_{first.replace(' ', '_')}"
            shown = zip(columns, others, strict=True)
            cells[module, test] = {column: text for column, text in shown if text}
    return cells


def updated(cells: Cells, record: Record) -> Cells:
    """Return the cells after a run of the whole suite: a row for each test there is."""
    counts = record.counts(BACKENDS)
    return {
        test: {
            **cells.get(test, {}),
            **{(each, record.torch): it for each, it in counts.get(test, {}).items()},
        }
        for test in tests()
    }


def deviations(cells: Cells, record: Record) -> list[str]:
    """Return where a run, which may be of some cases only, gave what is not shown."""
    return [
        f"{module}::{test}, {backend} with torch {record.torch}: the page shows "
        f"{shown!r}, the tests gave {text!r}; `make backend-table` writes it"
        for (module, test), counts in record.counts(BACKENDS).items()
        for backend, text in counts.items()
        for shown in [cells.get((module, test), {}).get((backend, record.torch))]
        if shown != text
    ]


def unexplained(cells: Cells) -> list[Test]:
    """Return the tests whose counts differ, and no reason says why."""
    versions = _versions(cells)
    return [
        test
        for test, shown in cells.items()
        for texts in [set(shown.values()) - {LACKING}]
        if len(texts) > 1 or any(not text.isdecimal() for text in texts)
        if not why(test[1], versions)
    ]


def written(page: str, cells: Cells) -> str:
    """Return the page with this table in it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{_rendered(cells)}\n\n{END}{after}"


def why(test: str, versions: Sequence[str]) -> str:
    """Return what the backends do differently in a test, and why."""
    known = [
        *(it for it in FAULTS if it.test.partition("[")[0] == test),
        *(it for it in DIFFERENCES if test in it.tests),
    ]
    who: dict[str, dict[str, None]] = {}
    for it in known:
        concerned = [version for version in versions if version in it.torch]
        if concerned and it.backend in BACKENDS:
            some = "" if concerned == versions else f" with {', '.join(concerned)}"
            who.setdefault(it.reason, {})[f"`{it.backend}`{some}"] = None
    return "<br>".join(
        f"{'both' if len(names) == len(BACKENDS) else ' and '.join(names)}: {reason}"
        for reason, names in who.items()
    )


def _rendered(cells: Cells) -> str:
    versions, sentences = _versions(cells), subjects()
    columns = [(backend, each) for each in versions for backend in BACKENDS]
    lines = [
        _line(["test", *map(_heading, columns), "what differs, and why"]),
        "|".join(["", *["---"] * (len(columns) + 2), ""]),
    ]
    module = said = ""
    for (each, test), shown in cells.items():
        if each != module:
            module = each
            subject = f"**{sentences.get(module, '')}** `{module}`"
            lines.append(_line([subject, *[""] * len(columns), ""]))
        sentence = test.removeprefix("test_").replace("_", " ")
        texts = [shown.get(column, "") for column in columns]
        reasons = why(test, versions)
        again = said and reasons == said
        lines.append(_line([sentence, *texts, "as above" if again else reasons]))
        said = reasons
    return "\n".join(lines)


def _versions(cells: Cells) -> list[str]:
    return sorted({torch for shown in cells.values() for _, torch in shown})


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _heading(column: Column) -> str:
    backend, torch = column
    return f"`{backend}` {torch}"


def _column(heading: str) -> Column:
    backend, _, torch = heading.partition(" ")
    return backend.strip("`"), torch


def _lines_of(page: str) -> list[list[str]]:
    """The cells of the table, line by line, without the rule below the heading."""
    within = page.partition(BEGIN)[2].partition(END)[0]
    lines = [
        line.strip("|").split(" | ") for line in within.split("\n") if " |" in line
    ]
    return [[text.strip() for text in line] for line in lines]


def _docstring(module: ast.Module) -> str:
    text = ast.get_docstring(module) or ""
    return text.partition("\n")[0].removesuffix(".").replace("``", "`")
