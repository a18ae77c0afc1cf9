"""Writes what a run of the suite recorded into docs/backend.md: ``make backend-table``.

Run from the root as ``python -m tests.conformance.report FILE``, with the file that
``pytest --backend-report FILE`` made. Without a file the table keeps its counts, and
gets the rows and the reasons that there are now.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from tests.conformance.backends import TORCH
from tests.conformance.results import Record
from tests.conformance.table import PAGE, cells_of, tests, updated, written


def main() -> None:
    """Write the page, unless tests of the suite failed or were not run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    file = parser.parse_args().file
    record = Record(TORCH)
    if file is not None:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
        if wrong := unusable(record):
            sys.exit("\n".join([f"{PAGE.name} stays as it is:", *wrong]))
    page = PAGE.read_text()
    PAGE.write_text(written(page, updated(cells_of(page), record)))


def unusable(record: Record) -> list[str]:
    """Return why a record says too little for a whole table."""
    run = {(case.module, case.test) for case in record.cases.values()}
    return [
        f"{identifier} {'failed' if case.outcome == 'failed' else 'was not run'}"
        for identifier, case in record.cases.items()
        if case.outcome in {"failed", "pending"}
    ] + [
        f"{module}::{test} was not run"
        for module, test in tests()
        if (module, test) not in run
    ]


if __name__ == "__main__":
    main()
