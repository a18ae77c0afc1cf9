"""Groups that do not end well: how ranks begin, and stay without an answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, job, rank, world
from tests.conformance.members import quiet
from tests.conformance.windows import board, numbers, raised

if TYPE_CHECKING:
    from collections.abc import Mapping


# What is out of time ends the process otherwise, whether it was waited for or not.
UNHANDLED: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def meeting() -> dist.Store:
    """Return a store that outlives the groups that meet in it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, world(), rank() == 0)


def in_turn(store: dist.Store, turn: int) -> dict[str, Any]:
    """Return the options of a group that is one of several in a process."""
    place = dist.PrefixStore(f"{turn}/", store)
    return {"store": place, "rank": rank(), "world_size": world()}


def begun(
    backend: str, variables: Mapping[str, str] | None = None, **options: Any
) -> torch.Tensor:
    """Open the default group as ``job`` does, and use it once.

    Its end is left to the caller. Returned is a number on the device.
    """
    quiet()
    os.environ.update(variables or {})
    device = job(backend, **options).__enter__()
    number = numbers(1, 1).to(device)
    dist.all_reduce(number)
    torch.cuda.synchronize()
    return number


def stay() -> None:
    """Answer nothing, and live until rank 0 is done or gone."""
    raised(board().wait, ["done"], TIMEOUT)


def be_done() -> None:
    """Let the ranks go that stay."""
    board().set("done", "")
