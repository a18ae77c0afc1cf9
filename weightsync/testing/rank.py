"""One rank of a call: a process that was forked from the nursery."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import random
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from weightsync.testing.messages import Function, Job

_SET_DEATH_SIGNAL: Final = 1


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank is to do, in a process that was forked for it.

    ``output`` and ``result`` are descriptors of files of its own: for everything that
    is written to the standard streams, and for what the function returns.
    """

    job: Job
    variables: dict[str, str]
    output: int
    result: int

    def run(self) -> NoReturn:
        """Call the function, and end the process; raise what the function raises."""
        self._settle()
        returned = _find(self.job.function)(*self.job.args)
        try:
            data = msgspec.msgpack.encode(returned)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.job.function.name} returned what msgpack cannot take: {error}"
            ) from error
        with os.fdopen(self.result, "wb") as file:
            file.write(data)
        _leave()

    def _settle(self) -> None:
        # What this rank starts is in its group, and is killed with it.
        os.setsid()
        _die_with_parent()
        os.dup2(self.output, sys.stdout.fileno())
        os.dup2(self.output, sys.stderr.fileno())
        _prepare_interpreter()
        os.environ.clear()
        os.environ.update(self.job.environment)
        os.environ.update(self.variables)
        sys.path[:] = self.job.path
        os.chdir(self.job.folder)
        _read_faults()


def _leave() -> NoReturn:
    """End as children of multiprocessing do.

    An interpreter that takes torch apart object by object copies all of it, as it is
    shared with the nursery: 0.4 s of a core for every rank.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    # os._exit comes next and skips them, and there is no public way to run them.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] # no other
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Die with the nursery, however that ends; it may be gone already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() == 1:
        os._exit(1)


def _prepare_interpreter() -> None:
    """Make it as that of a new process, whose output is read when it is killed."""
    # A rank's stdout is always a text file, which the stub leaves open.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # text
    random.seed()
    # Whoever is late gets SIGABRT: a traceback is wanted then, but no core.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_faults() -> None:
    """Tell the library, which was loaded before the environment was this one."""
    library = ctypes.CDLL(os.environ["WEIGHTSYNC_NCCL_LIBRARY"])
    if os.environ.get("WEIGHTSYNC_EMULATOR_FAULTS"):
        library.weightsync_emulator_read_faults()


def _find(function: Function) -> Callable[..., Any]:
    found: Any = _import(function)
    for name in function.name.split("."):
        found = getattr(found, name)
    # Checked above to be callable; attributes of modules are of any type.
    return found  # type: ignore[no-any-return] # decoded


def _import(function: Function) -> ModuleType:
    """Import a module by its name, or from its file where that gives another one."""
    if function.file is None:
        return importlib.import_module(function.module)
    spec = None
    if function.module != "__main__":
        try:
            spec = importlib.util.find_spec(function.module)
        except (ImportError, ValueError):
            spec = None
    if spec is not None and spec.origin == function.file:
        return importlib.import_module(function.module)
    return _load(function.module, function.file)


def _load(name: str, file: str) -> ModuleType:
    # As multiprocessing does: what stands under `if __name__ == "__main__"` is not run.
    name = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(Path(file).parent) not in sys.path:
        sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    return module
