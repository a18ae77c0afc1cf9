"""The table of docs/backend.md is what the tests gave."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from tests.conformance import report, table
from tests.conformance.backends import DIFFERENCES, TORCH
from tests.conformance.results import Case, Outcome, Record
from tests.conformance.table import BACKENDS, HERE, PAGE, Cells

if TYPE_CHECKING:
    from pathlib import Path

OURS: Final = "weightsync-nccl2"
MODULE, TEST = "test_windows", "test_a_put_of_nothing_is_a_signal"
SHOWN: Final[Cells] = {
    (MODULE, TEST): {("nccl2", "2.14"): "0 of 1", (OURS, "2.14"): "2"}
}


def test_the_page_shows_what_the_tests_gave(record: Record) -> None:
    """Of the tests that this session ran before; conftest.py lets it come last."""
    cells = table.cells_of(PAGE.read_text())

    assert [] == table.deviations(cells, record)


def test_the_page_is_as_it_would_be_written() -> None:
    page = PAGE.read_text()

    assert table.written(page, table.cells_of(page)) == page


def test_every_test_is_in_the_table() -> None:
    assert table.tests() == list(table.cells_of(PAGE.read_text()))


def test_this_torch_is_in_the_table() -> None:
    cells = table.cells_of(PAGE.read_text())
    columns = {column for shown in cells.values() for column in shown}

    assert {(backend, TORCH) for backend in BACKENDS} <= columns


def test_whatever_is_not_alike_has_a_reason() -> None:
    assert [] == table.unexplained(table.cells_of(PAGE.read_text()))


def test_a_session_records_what_it_runs_and_that_there_is_more(tmp_path: Path) -> None:
    file, test = tmp_path / "record", "test_a_backend_is_of_its_own_class"
    options = ["-m", "", "-k", f"{test} and not weightsync", "--backend-report", file]
    command = [sys.executable, "-m", "pytest", HERE / "test_backends.py", *options]
    subprocess.run(command, check=True, cwd=HERE.parents[1], stdout=subprocess.DEVNULL)
    record = msgspec.json.decode(file.read_bytes(), type=Record)

    assert {("test_backends", test): {"nccl2": "1"}} == record.counts(BACKENDS)
    assert any(
        line.endswith(f"{test}[{OURS}] was not run") for line in report.unusable(record)
    )


def test_every_difference_is_of_a_test_that_exists() -> None:
    named = {test for difference in DIFFERENCES for test in difference.tests}

    assert set() == named - {test for _, test in table.tests()}


def recorded(*outcomes: Outcome) -> Record:
    fault: Outcome = "differs"
    cases = [Case(MODULE, TEST, OURS, str(each), (), each) for each in outcomes]
    torchs = Case(MODULE, TEST, "nccl2", "", ("a reason",), fault)
    return Record(
        "2.14", {str(number): each for number, each in enumerate([torchs, *cases])}
    )


@pytest.mark.parametrize(
    ("outcomes", "shown"),
    [
        (["passed", "passed"], "2"),
        (["passed", "differs"], "1 of 2"),
        (["differs"], "0 of 1"),
        (["lacking"], "not yet"),
        ([], "-"),
        (["passed", "pending"], None),
        (["passed", "failed"], None),
    ],
)
def test_cases_are_counted_once_all_were_run(
    outcomes: list[Outcome], shown: str | None
) -> None:
    counts = recorded(*outcomes).counts(BACKENDS)

    assert shown == counts[MODULE, TEST].get(OURS)


@pytest.mark.parametrize(
    ("phases", "reasons", "outcome"),
    [
        (["passed", "passed"], (), "passed"),
        (["passed", "passed"], ("a reason",), "differs"),
        (["failed", "passed"], (), "failed"),
        (["passed", "failed"], ("a reason",), "failed"),
    ],
)
def test_a_case_passes_when_nothing_of_it_fails(
    phases: list[str], reasons: tuple[str, ...], outcome: Outcome
) -> None:
    record = Record("2.14", {"it": Case(MODULE, TEST, OURS, "", reasons)})
    for phase in phases:
        record.ended("it", phase)

    assert outcome == record.cases["it"].outcome


def test_a_page_that_shows_something_else_is_wrong() -> None:
    [other] = table.deviations(SHOWN, recorded("passed", "differs"))

    assert other.startswith(f"{MODULE}::{TEST}, {OURS} with torch 2.14: ")
    assert "the page shows '2', the tests gave '1 of 2'" in other
    assert [] == table.deviations(SHOWN, recorded("passed", "passed"))
    assert [] == table.deviations(SHOWN, recorded("passed", "pending"))
    assert 2 == len(table.deviations({}, recorded("passed", "passed")))


def test_the_columns_of_another_torch_stay() -> None:
    cells = {test: {(OURS, "2.15"): "3", (OURS, "2.14"): "5"} for test in table.tests()}
    every = table.updated(cells, recorded("passed"))

    assert table.tests() == list(every)
    assert "1" == every[MODULE, TEST][OURS, "2.14"]
    assert "3" == every[MODULE, TEST][OURS, "2.15"]
    assert every == table.cells_of(table.written(f"{table.BEGIN}\n{table.END}", every))


def test_a_fault_of_some_versions_names_them() -> None:
    name = "test_a_group_to_be_formed_may_be_bound_to_a_device"

    assert table.why(name, ["2.14", "2.15"]).startswith("`nccl2` with 2.14: ")
    assert table.why(name, ["2.14"]).startswith("`nccl2`: ")
    assert "" == table.why(name, ["2.15"])
