"""The engine "torch-nccl2": as "nccl", but with the windows of torch's own backend.

There is no call for many puts, none for several signals and none that copies within a
window: each row is a put of its own, each signal a wait, and copies are ours.
"""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import HashStore

from weightsync import _C
from weightsync.engine_nccl import WAIT_SECONDS, NcclEngine
from weightsync.errors import TimedOutError
from weightsync.group_torch import TorchGroup, create_torch
from weightsync.operation import Operation, Operations
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightsync.budget import Budget

_ZEROS: Final = 16 << 20


class TorchNcclEngine(NcclEngine):
    """Windows of torch's own. Raises UnsupportedError where there are none."""

    name = "torch-nccl2"

    def __init__(
        self, device: torch.device | None = None, *, budget: Budget | None = None
    ) -> None:
        # A window in one piece: nothing is mapped twice for torch's.
        super().__init__(device, segment=0, budget=budget)
        # Memory is needed before a link is formed; all groups of torch offer the same.
        self._maker: Final = create_torch(HashStore(), 0, 1, timedelta(minutes=10))
        self._pooling: Final = threading.Lock()
        self._pools: list[tuple[weakref.ref[Tensor], torch.cuda.MemPool]] = []

    def group(self, *, first: bool) -> Any:
        """See ``Engine``."""
        return TorchGroup(self.device, self.host, first=first)

    def window(self, group: Any, memory: Tensor) -> Window:
        """See ``Engine``. With NCCL 2.30 all ranks meet in their first operation."""
        window = _Window(group, memory, self)
        window.meet()
        return window

    def _allocate(
        self,
        group: Any,  # noqa: ARG002 -- one may serve several.
        nbytes: int,
    ) -> Tensor:
        """Of a pool of its own, which ends with it."""
        pool = torch.cuda.MemPool(self._maker.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        zeros = torch.zeros(min(nbytes, _ZEROS), dtype=torch.uint8)
        for start in range(0, nbytes, _ZEROS):
            part = memory[start : start + _ZEROS]
            part.copy_(zeros[: part.numel()])
        with self._pooling:
            self._pools = [each for each in self._pools if each[0]() is not None]
            self._pools.append((weakref.ref(memory), pool))
        return memory

    async def finished(self, operation: Operation) -> None:
        """See ``Engine``."""
        if isinstance(operation, _Heard):
            operation.limit = time.monotonic() + WAIT_SECONDS
        await operation

    async def heard(self, work: Any, operation: _Heard) -> None:
        """Wait for work of torch's, until the group ends.

        Its stream is of no use any more where the work never ends.
        """
        lane = self._take()
        await lane.run(work.wait)
        await lane.idle(operation.check)
        self._lanes.append(lane)


class _Heard(Operations):
    """Works of torch's, in the order in which they end."""

    def __init__(
        self, works: Sequence[Any], group: TorchGroup, engine: TorchNcclEngine
    ) -> None:
        super().__init__([Operation(work, group) for work in works])
        self.limit = float("inf")
        self._works: Final = works
        self._group: Final = group
        self._engine: Final = engine

    def check(self) -> None:
        """Raise what keeps it from an end."""
        self._group.check()
        if time.monotonic() > self.limit:
            raise TimedOutError("torch's nccl2 does not end what can end")

    async def _finish(self) -> None:
        if self._works:
            await self._engine.heard(self._works[-1], self)
        self._group.check()


class _Window(Window):
    """A window of torch's."""

    def __init__(
        self, group: TorchGroup, tensor: Tensor, engine: TorchNcclEngine
    ) -> None:
        super().__init__(group, tensor)  # type: ignore[arg-type] # it has its face
        self._of: Final = group
        self._engine: Final = engine

    def meet(self) -> None:
        """Make the first operation, as all ranks do. Blocks, until all have."""
        self._window.signal(self.rank, False)
        self._window.wait_signal(self.rank, False)

    def copy_in_order(self, tensors: Sequence[Tensor], runs: Tensor) -> None:
        """See ``Window``."""
        self._check_open()
        _C.copy_into(self._tensor, list(tensors), runs)

    def _issued(self, work: Any) -> Operation:
        return self._all([work])

    def _all(self, works: Sequence[Any]) -> Operation:
        return _Heard(works, self._of, self._engine)
