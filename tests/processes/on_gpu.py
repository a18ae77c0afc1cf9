"""Whole tests on a GPU, emulated or not: bodies run there, in own processes."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import multiprocessing.forkserver as servers
import os
import pickle
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from tests.processes.emulated import EmulatedProcesses
from tests.processes.harness import Child, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.processes.harness import Control

SECONDS: Final = 600.0
"""More than any test takes: its own limit ends it."""

VARIABLES: Final = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""One process is several ranks, and all of its tensors are on one GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of a test runs: on which GPU, and what the CPU computes there."""

    number: int
    emulated: bool
    kernels: bool
    """Whether the CPU also computes what weightsync needs a kernel for."""


def run_there(item: pytest.Function, *, emulated: bool, kernels: bool) -> None:
    """Run a test on a GPU; raises ChildError with what it raised."""
    processes = EmulatedProcesses() if emulated else Processes()
    place = Place(0, emulated, kernels)
    packed = pickle.dumps((_test, (place, *_parts(item))))
    try:
        processes.start(_start, place, packed, name=item.name).result(SECONDS)
    finally:
        processes.end()


def _parts(item: pytest.Function) -> tuple[Any, ...]:
    """What of a test can be sent, and the names of what is made there."""
    names = item._fixtureinfo.argnames
    values = {name: item.funcargs[name] for name in names if name not in _MADE}
    backend = item.funcargs.get("anyio_backend", "asyncio")
    function = getattr(item.module, item.originalname)  # as it is without plug-ins
    return function, [name for name in names if name in _MADE], values, backend


def _start(control: Control, place: Place, packed: bytes) -> Any:
    """Run a function on a GPU: what its module makes when it is imported as well."""
    os.environ.update(VARIABLES)
    # The server that has started this process starts others for it: Python's would be
    # a new one, which imports everything again.
    servers._forkserver.ensure_running = lambda: None  # type: ignore[method-assign] # ours only
    import torch

    from tests.processes.placing import placed

    torch.cuda.set_device(place.number % torch.cuda.device_count())
    with placed(emulated=place.emulated, kernels=place.kernels):
        function, args = pickle.loads(packed)
        result = function(control, *args)
        return anyio.run(lambda: result) if inspect.iscoroutine(result) else result


class _Children(Processes):
    """Processes of a test that runs on a GPU: each is on one of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def start(
        self, function: Callable[..., Any], *args: object, name: str | None = None
    ) -> Child:
        """Run ``function(control, *args)`` on a GPU that no other child has."""
        place = replace(self._place, number=len(self._children) + 1)
        label = name or f"{function.__name__}-{place.number}"
        child = Child(label, _start, (place, pickle.dumps((function, args))))
        self._children.append(child)
        return child


@contextmanager
def _processes(place: Place) -> Iterator[Processes]:
    multiprocessing.current_process().daemon = False  # which may not have children
    children = _Children(place)
    try:
        yield children
    finally:
        children.end()


class _Log(logging.Handler):
    """As pytest's ``caplog``, as far as it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _caplog(place: Place) -> Iterator[_Log]:
    log = _Log()
    logging.getLogger().addHandler(log)
    yield log


_MADE: Final[dict[str, Callable[[Place], Any]]] = {
    "caplog": _caplog,
    "monkeypatch": lambda place: pytest.MonkeyPatch.context(),
    "processes": _processes,
}
"""Fixtures that are made where the body runs; the others are sent."""


def _test(
    control: Control,
    place: Place,
    function: Callable[..., Any],
    made: list[str],
    values: dict[str, Any],
    backend: Any,
) -> None:
    name, options = (backend, {}) if isinstance(backend, str) else backend
    with ExitStack() as stack:
        fixtures = {each: stack.enter_context(_MADE[each](place)) for each in made}
        call = partial(function, **fixtures, **values)
        if inspect.iscoroutinefunction(function):
            anyio.run(call, backend=name, backend_options=options)
        else:
            call()
