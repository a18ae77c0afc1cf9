"""Windows of ours, for the tests of what they have beside what c10d promises."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance import windows

if TYPE_CHECKING:
    from tests.conformance.windows import Memory

OURS: Final = "weightsync-nccl2"
NCCLS: Final = ("2.30.7", "2.31.2")
LIMIT: Final = timedelta(seconds=20)
MEBI: Final = 1 << 20


def mine(device: torch.device) -> Any:
    """Return our part of the default group."""
    group: Any = dist.group.WORLD
    return group._get_backend(device)


def table(*rows: list[int]) -> torch.Tensor:
    """Return a table of runs: tensor, offsets, rows, bytes of a row, strides."""
    return torch.tensor(rows, dtype=torch.int64)


def octet_range(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count).to(torch.uint8)


def opened(
    device: torch.device, values: torch.Tensor
) -> tuple[Memory, torch.Tensor, Any]:
    """Open a window of ours, which has more than c10d knows."""
    return windows.opened(device, values)


def over(work: Any) -> None:
    """Wait on the host."""
    work.wait(LIMIT)
