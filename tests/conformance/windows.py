"""Memory that may become a window, and windows over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Window


class Memory:
    """Memory from the allocator of the default group's backend.

    It lives as long as this: freeing it would take it out of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr] # there is one
        self.device = device
        self._pool = torch.cuda.MemPool(backend.mem_allocator)

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """Return new memory with these values in it."""
        with torch.cuda.use_mem_pool(self._pool):
            tensor = torch.empty_like(values, device=self.device)
        tensor.copy_(values)
        return tensor


def opened(
    device: torch.device, values: torch.Tensor
) -> tuple[Memory, torch.Tensor, Window]:
    """Open a window over memory with these values, which every rank has to do."""
    memory = Memory(device)
    tensor = memory.holding(values)
    return memory, tensor, dist._new_window(tensor)


def numbers(first: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return ``count`` numbers that follow each other, on the host."""
    return torch.arange(first, first + count).to(dtype)


def raised(function: Any, *args: Any) -> str:
    """Return the name and the message of what a call raises, empty if nothing."""
    try:
        function(*args)
    except (RuntimeError, ValueError, TypeError, IndexError, WeightSyncError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def board() -> dist.Store:
    """Return a store that all ranks of the job have in common."""
    return dist.PrefixStore("test/", dist.distributed_c10d._get_default_store())
