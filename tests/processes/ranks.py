"""Ranks of a shared-memory process group as threads of the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions, WaitSignalOptions

import weightsync
from weightsync.backend import create_shm

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

SECONDS = 10.0


def in_threads(functions: list[Callable[[], T]]) -> list[T]:
    """Run functions together; return what they return, raise what they raise."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.result(30) for future in futures]


def outcomes(functions: list[Callable[[], Any]]) -> list[Any]:
    """Like ``in_threads``, but an exception is an outcome too."""

    def caught(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except weightsync.WeightSyncError as error:
            return error

    return in_threads([lambda f=f: caught(f) for f in functions])


def form(size: int, seconds: float = SECONDS) -> list[Any]:
    """Form a group of this size; return its ranks."""
    store = dist.HashStore()
    timeout = timedelta(seconds=seconds)
    return in_threads(
        [
            lambda rank=rank: create_shm(store, rank=rank, size=size, timeout=timeout)
            for rank in range(size)
        ]
    )


def elastic(count: int) -> list[Any]:
    """Return members that no group has yet."""
    return [create_shm(None, enable_reconfigure=True) for _ in range(count)]


def options(uuid: int, handles: Any, seconds: float = SECONDS) -> ReconfigureOptions:
    """Return the options of one reconfiguration."""
    found = ReconfigureOptions()
    found.uuid = uuid
    found.handles = handles
    found.timeout = timedelta(seconds=seconds)
    return found


def reconfigure(group: Any, uuid: int, handles: Any, seconds: float = SECONDS) -> None:
    """Reconfigure one member and wait."""
    group.reconfigure(options(uuid, handles, seconds)).wait()


def reform(groups: list[Any], uuid: int) -> None:
    """Reconfigure all these members into one group, ranks by position."""
    handles = [group.get_reconfigure_handle() for group in groups]
    in_threads([lambda g=g: reconfigure(g, uuid, handles) for g in groups])


def windows(
    groups: list[Any], nelems: int, dtype: torch.dtype = torch.uint8
) -> list[tuple[Any, torch.Tensor]]:
    """Create a c10d window on every rank; return each with its memory."""

    def create(group: Any) -> tuple[Any, torch.Tensor]:
        cpu = torch.device("cpu")
        memory = group.allocate_tensor(nelems, dtype=dtype, device=cpu)
        return group.new_window(memory), memory

    return in_threads([lambda g=g: create(g) for g in groups])


def wait_options(seconds: float) -> WaitSignalOptions:
    """Return the options of one wait_signal."""
    found = WaitSignalOptions()
    found.timeout = timedelta(seconds=seconds)
    return found


def end(groups: list[Any]) -> None:
    """Shut every member down."""
    for group in groups:
        group.shutdown()
