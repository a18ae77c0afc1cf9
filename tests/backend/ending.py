"""What tests of groups that fail or end have in common."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

OURS: Final = "weightsync-nccl2"

# Within which an error is to come, and an abort or a destruction to end, in seconds.
BOUND: Final = 5.0


def options(**fields: Any) -> Any:
    from weightsync.backend import NcclOptions

    made = NcclOptions()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def mine() -> Any:
    """Return our part of the default group."""
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cuda"))


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def until_over(work: Any) -> None:
    """Wait on the host, for an operation that has a time of its own."""
    while not work.is_completed():
        time.sleep(0.01)


def until_gone(process: int) -> None:
    """Wait until a process has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        select.select([descriptor], [], [])
        os.close(descriptor)


def ended_in_time() -> bool:
    """Abort and destroy the default group; return whether neither took too long."""
    group: Any = dist.group.WORLD
    ends = [seconds_of(group.abort), seconds_of(dist.destroy_process_group)]
    return max(ends) < BOUND
