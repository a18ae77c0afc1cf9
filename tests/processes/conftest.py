"""Fixtures for tests with real processes, and the engines that they run on."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import in_shared_memory
from tests.processes.emulated import EmulatedProcesses
from tests.processes.engines import (
    EMULATED_NCCL,
    ENGINES,
    PARAMETERS,
    REAL_NCCL,
    SHARED_MEMORY,
    Engine,
)
from tests.processes.faulty import Pool
from tests.processes.harness import Processes, free_address
from tests.processes.on_gpu import run_there
from tests.processes.transports import KERNELS, parameters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on each engine what asks for it, and every test of the transport."""
    item = metafunc.definition
    if _chooses(item):
        return
    found = parameters(item.path.stem, metafunc.function.__name__)
    metafunc.parametrize("engine", PARAMETERS if _asks(item) else found, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test of the transport on a GPU, unless it starts there."""
    found = pyfuncitem.funcargs.get("engine")
    if found in {None, SHARED_MEMORY} or _asks(pyfuncitem) or _chooses(pyfuncitem):
        return None
    kernels = bool(KERNELS & {pyfuncitem.path.stem, pyfuncitem.originalname})
    run_there(pyfuncitem, emulated=found is EMULATED_NCCL, kernels=kernels)
    return True


def _asks(item: pytest.Function) -> bool:
    """Whether a test names the engine, and starts its processes there by itself."""
    used = [name for mark in item.iter_markers("usefixtures") for name in mark.args]
    return "engine" in {*used, *inspect.signature(item.function).parameters}


def _chooses(item: pytest.Function) -> bool:
    """Whether a test says itself on which engines it runs."""
    return any(mark.args[0] == "engine" for mark in item.iter_markers("parametrize"))


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Run on each engine; ``processes`` are then on it."""
    return {**ENGINES, REAL_NCCL.name: REAL_NCCL}[request.param]


@pytest.fixture
def processes(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Start children; what is left at the end of the test is killed."""
    mark = request.node.get_closest_marker("emulated")
    found = EmulatedProcesses(**mark.kwargs) if mark else engine.processes()
    yield found
    found.end()


@pytest.fixture
def address() -> str:
    """An address for a store that nobody uses yet."""
    return free_address()


@pytest.fixture
def pool(tmp_path: Path, address: str) -> Iterator[Pool]:
    """A pool on emulated NCCL in which calls go wrong; it leaves nothing behind."""
    before = in_shared_memory()
    processes = EmulatedProcesses()
    yield Pool(processes, address, tmp_path)
    processes.end()

    assert set() == in_shared_memory() - before


@pytest.fixture(
    params=[
        "2.30.7",
        pytest.param("2.31.2", marks=pytest.mark.slow),
        pytest.param("2.32.3", marks=pytest.mark.slow),
    ]
)
def every_nccl(request: pytest.FixtureRequest, pool: Pool) -> None:
    """Run on each NCCL that the engine takes."""
    pool.nccl = request.param
