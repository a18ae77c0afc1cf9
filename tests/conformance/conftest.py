"""Runs each test of the suite for every backend, and records what it gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from tests.conformance import backends
from tests.conformance.backends import BACKENDS, FAULTS, LACKING, PEERS, TORCH, Fault
from tests.conformance.results import Case, Record
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Nodes = list[pytest.Item | pytest.Collector] | pytest.Item | pytest.Collector | None
    Collecting = Generator[None, Nodes, Nodes]
    Reporting = Generator[None, pytest.TestReport, pytest.TestReport]

RECORD: Final = pytest.StashKey[Record]()
LAST: Final = "test_the_page_shows_what_the_tests_gave"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `scripts/backend-table` have what the tests gave."""
    parser.addoption("--backend-report", metavar="FILE", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Begin with an empty record."""
    config.stash[RECORD] = Record(TORCH)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill the parameter ``backend``, with those that have what the module NEEDS."""
    marks = metafunc.definition.iter_markers("parametrize")
    given = any("backend" in mark.args[0] for mark in marks)
    if "backend" in metafunc.fixturenames and not given:
        needed = getattr(metafunc.module, "NEEDS", None)
        able = [each for each in BACKENDS if needed not in LACKING.get(each, ())]
        metafunc.parametrize("backend", able)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Collecting:
    """Record which cases there are, also those that nobody selects."""
    items = yield
    if isinstance(items, list):
        record = collector.config.stash[RECORD]
        found = [item for item in items if isinstance(item, pytest.Function)]
        for item in found:
            record.cases.update(_cases(item))
    return items


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark backends of torch and known faults, and skip without an emulator.

    What holds the record against the page comes last.
    """
    items.sort(key=lambda item: item.name == LAST)
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(testing.requires_emulator())
        if isinstance(item, pytest.Function) and _backend(item) in PEERS:
            item.add_marker(pytest.mark.peer)
        for fault in FAULTS:
            if not fault.cases and _meets(item, fault):
                item.add_marker(pytest.mark.xfail(reason=fault.reason, strict=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Reporting:
    """Record what a test gave; one that is skipped was not run."""
    report = yield
    record = item.config.stash[RECORD]
    skipped = report.skipped and not hasattr(report, "wasxfail")
    over = report.failed or (report.when == "call" and not skipped)
    if over and item.nodeid in record.cases:
        record.ended(item.nodeid, "failed" if report.failed else "passed")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, if it was asked for."""
    file = session.config.getoption("--backend-report", default=None)
    if file is not None:
        file.write_bytes(msgspec.json.encode(session.config.stash[RECORD]))


@pytest.fixture
def record(pytestconfig: pytest.Config) -> Record:
    """Return what the tests gave until now."""
    return pytestconfig.stash[RECORD]


@pytest.fixture
def deviations(request: pytest.FixtureRequest) -> Callable[..., dict[str, str]]:
    """Return ``backends.deviations`` with the faults of this test and backend."""
    known = [fault for fault in FAULTS if fault.cases and _meets(request.node, fault)]
    return partial(backends.deviations, known)


def _cases(item: pytest.Function) -> dict[str, Case]:
    """The case that an item is, by its identifier, and those of backends without it."""
    module, needed = item.path.stem, getattr(item.module, "NEEDS", None)
    if "backend" not in item.fixturenames:
        return {}
    reasons = dict.fromkeys(fault.reason for fault in FAULTS if _meets(item, fault))
    case = Case(module, item.originalname, _backend(item), _others(item), (*reasons,))
    return {
        item.nodeid: case,
        **{
            f"{module}::{case.test}[{each}]": Case(
                module, case.test, each, outcome="lacking"
            )
            for each in BACKENDS
            if needed in LACKING.get(each, ())
        },
    }


def _backend(item: pytest.Function) -> str:
    known = item.callspec.params if hasattr(item, "callspec") else {}
    return str(known.get("backend", ""))


def _others(item: pytest.Function) -> str:
    """The identifiers of the parameters other than the backend."""
    identifiers = item.name.removeprefix(item.originalname).strip("[]")
    return f"-{identifiers}-".replace(f"-{_backend(item)}-", "-").strip("-")


def _meets(item: pytest.Item, fault: Fault) -> bool:
    assert isinstance(item, pytest.Function)
    names = {item.originalname, f"{item.originalname}[{_others(item)}]"}
    return (
        fault.backend == _backend(item) and TORCH in fault.torch and fault.test in names
    )
