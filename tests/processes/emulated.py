"""Processes on emulated GPUs: each has one of its own, chosen before it begins."""

from __future__ import annotations

import multiprocessing.forkserver as servers
import multiprocessing.popen_forkserver as launching
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tests.processes.harness import CONTEXT, PRELOADED, Child, Processes
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.processes.harness import Control

GPUS: Final = 64
HANG_SECONDS: Final = 25.0
"""After so long the emulator ends a process that hangs, and says why."""


class _Server(servers.ForkServer):
    """A fork server that has imported everything on the emulator."""

    def ensure_running(self) -> None:
        variables = testing.environment(gpus=GPUS, hang_seconds=HANG_SECONDS)
        # NumPy's library starts threads when it is imported, and then nobody can fork.
        with _set(os.environ, {**variables, "OPENBLAS_NUM_THREADS": "1"}):
            super().ensure_running()


_server: Final = _Server()
_server.set_forkserver_preload(PRELOADED)


@contextmanager
def _set(where: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: where.get(name) for name in values}
    where.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del where[name]
            else:
                where[name] = value


class _Popen(launching.Popen):
    """Asks our server, where multiprocessing asks the only one that it knows."""

    def _launch(self, process_obj: Any) -> None:
        ours = {"connect_to_new_process": _server.connect_to_new_process}
        with _set(vars(servers), ours):
            super()._launch(process_obj)


class _Process(CONTEXT.Process):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 -- of multiprocessing.
        return _Popen(process_obj)


class _Child(Child):
    PROCESS = _Process


def _on_gpu(
    control: Control,
    number: int,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    *args: object,
) -> Any:
    os.environ.update(variables)
    import torch

    torch.cuda.set_device(number)
    control.device = "cuda"
    return function(control, *args)


class EmulatedProcesses(Processes):
    """As ``Processes``; its other attributes are those of what starts next.

    ``strict`` refuses what NCCL leaves undefined: sources that are not registered,
    windows over each other.
    """

    device = "cuda"

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.faults = ""
        self.nccl = "2.30.7"
        self.strict = strict
        self.hang_seconds = HANG_SECONDS

    def start(
        self, function: Callable[..., Any], *args: object, name: str | None = None
    ) -> Child:
        """Run ``function(control, *args)`` on a GPU that no other child has."""
        number = len(self._children)
        label = name or f"{function.__name__}-{number}"
        variables = {
            "WEIGHTSYNC_EMULATOR_FAULTS": self.faults,
            "WEIGHTSYNC_EMULATOR_NCCL": self.nccl,
            "WEIGHTSYNC_EMULATOR_STRICT": str(int(self.strict)),
            "WEIGHTSYNC_EMULATOR_HANG_SECONDS": f"{self.hang_seconds:g}",
        }
        given = (number % GPUS, variables, function, *args)
        child = _Child(label, _on_gpu, given)
        self._children.append(child)
        return child
