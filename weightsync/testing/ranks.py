"""Runs a function on ranks that are processes on emulated GPUs."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from weightsync.errors import PlanError
from weightsync.testing.environment import DEFAULT_GPUS, DEFAULT_NCCL, environment
from weightsync.testing.messages import Function, Job
from weightsync.testing.nursery import Limits, Nurseries
from weightsync.testing.outcome import Outcome, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_RANKS: Final = 64
DEFAULT_TIMEOUT: Final = 60.0

_nurseries: Final = Nurseries()

# Differ from call to call, and mean nothing before a rank has started.
_VOLATILE: Final = frozenset({"PYTEST_CURRENT_TEST"})


class Options(TypedDict, total=False):
    """What ``emulated`` and ``outcomes`` take besides the function.

    ``gpus``: how many there are; 8 or the number of ranks unless given.
    ``memory``: bytes of each GPU; 16 GiB unless given.
    ``faults``: what shall go wrong, see docs/emulator.md.
    ``nccl``: whose version's behaviour is emulated, ``2.30.7`` unless given.
    ``hang_seconds``: after how long a hang is diagnosed; half the timeout unless given.
    ``timeout``: seconds after which ranks that still run are killed; 60 unless given.
    """

    gpus: int
    memory: int
    faults: str | Iterable[str]
    nccl: str
    hang_seconds: float
    timeout: float


def emulated(
    function: Callable[..., Any] | str,
    ranks: int,
    *,
    args: Sequence[Any] = (),
    **options: Unpack[Options],
) -> list[Any]:
    """Run a function in one process for each rank, on emulated GPUs.

    The function is one of a module, itself or as ``"module:name"``, and is called with
    ``args``. Its process finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, as
    torch wants them, and may take any of the GPUs. Arguments and results travel as
    msgpack: numbers, text, bytes, lists, dicts.

    The first call imports torch in a process of its own, from which the ranks are
    forked; later calls start in milliseconds. That process ends with this one.

    Args:
        function: What every rank does.
        ranks: How many ranks there are.
        args: Its arguments, the same for every rank.
        options: Those of ``Options``.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksFailedError: If a rank failed or took too long, with the output of every
            one. Others are killed five seconds after the first failure.
        PlanError: If an argument cannot be.
        UnsupportedError: If there is no emulator here.
    """
    found = _run(function, ranks, args, options, patient=False)
    check(_name(function), found)
    return [each.result for each in found]


def outcomes(
    function: Callable[..., Any] | str,
    ranks: int,
    *,
    args: Sequence[Any] = (),
    **options: Unpack[Options],
) -> list[Outcome]:
    """As ``emulated``, for ranks that are meant to fail: return what became of each.

    Ranks are not killed when another one fails, only when the time is over.
    """
    return _run(function, ranks, args, options, patient=True)


def _run(
    function: Callable[..., Any] | str,
    ranks: int,
    args: Sequence[Any],
    options: Options,
    *,
    patient: bool,
) -> list[Outcome]:
    if not 1 <= ranks <= MAX_RANKS:
        raise PlanError(f"ranks is {ranks}, but must be from 1 to {MAX_RANKS}")
    located = _locate(function)
    timeout = options.get("timeout", DEFAULT_TIMEOUT)
    variables = environment(
        gpus=options.get("gpus", max(DEFAULT_GPUS, ranks)),
        memory=options.get("memory"),
        nccl=options.get("nccl", DEFAULT_NCCL),
        faults=options.get("faults", ()),
        hang_seconds=options.get("hang_seconds", timeout / 2),
    )
    nursery = _nurseries.suited(_common(variables))
    job = Job(
        function=located,
        args=list(args),
        environment={
            **os.environ,
            **variables,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        },
        path=list(sys.path),
        folder=str(Path.cwd()),
    )
    return nursery.run(job, ranks, Limits(timeout, patient=patient))


def _common(variables: dict[str, str]) -> dict[str, str]:
    """The environment of the nursery: what is the same for many calls."""
    everything = {**os.environ, **variables}
    return {
        name: value
        for name, value in everything.items()
        if name not in _VOLATILE and not name.startswith("WEIGHTSYNC_EMULATOR_")
    }


def _locate(function: Callable[..., Any] | str) -> Function:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        if not module or not name:
            raise PlanError(f"function is {function!r}, but must be module:name")
        return Function(module, name)
    home: str = getattr(function, "__module__", "")
    path: str = getattr(function, "__qualname__", "<nothing>")
    if not home or "<" in path:
        raise PlanError(
            f"{function!r} is no function of a module, which another process could find"
        )
    file = getattr(sys.modules.get(home), "__file__", None)
    return Function(home, path, None if file is None else str(Path(file).absolute()))


def _name(function: Callable[..., Any] | str) -> str:
    located = _locate(function)
    return f"{located.module}:{located.name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
