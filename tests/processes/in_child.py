"""Lets coroutines that take a device be tests, each in a process on each engine."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.processes.engines import Engine
    from tests.processes.harness import Control, Processes

SECONDS = 50.0


def in_child(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function whose first argument is ``device``.

    What it asserts it asserts in the child; the other arguments may be parametrised.
    """

    def run(engine: Engine, processes: Processes, **given: object) -> None:
        child = processes.start(_call, test.__module__, test.__name__, given)
        child.result(SECONDS)

    fixtures = list(inspect.signature(run).parameters.values())[:2]
    own = list(inspect.signature(test).parameters.values())[1:]
    found: Any = run
    found.__signature__ = inspect.Signature([*fixtures, *own])
    found.__name__, found.__module__ = test.__name__, test.__module__
    found.coroutine = test
    return run


async def _call(control: Control, module: str, name: str, given: Any) -> None:
    test = getattr(import_module(module), name).coroutine
    await test(control.device, **given)
