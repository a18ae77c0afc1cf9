"""Runs programs in processes as torchrun and python would, and fails if one does."""

from __future__ import annotations

import os
import runpy
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.processes.harness import Processes, free_address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.docs.programs import Program, Refusal
    from tests.processes.harness import Child, Control

SECONDS = 40.0


def run(folder: Path, programs: Sequence[Program], *, mode: str = "staged") -> None:
    """Run programs of one job, each in its processes, until all have ended well.

    ``mode`` is the one of generators that are given none. Raises what the first process
    that fails raises.
    """
    processes = Processes()
    try:
        store = free_address()
        children = [
            processes.start(_main, str(path), environment, mode, name=path.stem)
            for program in programs
            for path in [_saved(folder, program)]
            for environment in _environments(program, store)
        ]
        _end_well(children)
    finally:
        processes.end()


def refused(refusal: Refusal) -> str:
    """Make a call in a process of its own; return its error as the page shows them."""
    processes = Processes()
    try:
        error: str = processes.start(_refused, refusal).result(SECONDS)
    finally:
        processes.end()
    return error


def _saved(folder: Path, program: Program) -> Path:
    path = folder / f"{program.role}.py"
    path.write_text(program.text)
    return path


def _environments(program: Program, store: str) -> list[dict[str, str]]:
    """What the program's processes find: with torchrun a rank, with python nothing."""
    common = {"WEIGHTSYNC_STORE": store}
    if program.processes is None:
        return [common]
    port = free_address().rpartition(":")[2]
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["WORLD_SIZE"] = common["LOCAL_WORLD_SIZE"] = str(program.processes)
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(program.processes)
    ]


def _main(control: Control, path: str, environment: dict[str, str], mode: str) -> None:
    import weightsync.blocking

    os.environ.update(environment)
    defaults: Any = weightsync.blocking.Generator.__init__.__kwdefaults__
    defaults["mode"] = mode
    runpy.run_path(path, run_name="__main__")


def _refused(control: Control, refusal: Refusal) -> str:
    import weightsync

    names: dict[str, Any] = {}
    exec(refusal.setup, names)
    try:
        exec(refusal.call, names)
    except weightsync.WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _end_well(children: Sequence[Child]) -> None:
    """Wait for all; once one has failed the others are not waited for."""
    with ThreadPoolExecutor(len(children)) as pool:
        ends = [pool.submit(_end, child) for child in children]
        ended, waiting = wait(ends, return_when=FIRST_EXCEPTION)
        failed = [end for end in ended if end.exception() is not None]
        if waiting:
            for child in children:
                with suppress(ProcessLookupError):
                    child.kill()
    for end in failed or ends:
        end.result()


def _end(child: Child) -> None:
    child.result(SECONDS)
    code = child.join()
    assert code == 0, f"{child.name} ended with exit code {code}"
