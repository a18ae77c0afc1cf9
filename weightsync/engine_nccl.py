"""The engine "nccl": memory of one GPU, moved by the process group of weightsync.

Puts are staged (``staging.py``), unless they come straight from memory of the caller
(``straight.py``); nothing here launches a kernel, unless a received tensor is not
contiguous or a pushed one is converted. No wait for signals is issued before it is
satisfied, because nothing ends one that is not.
"""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import anyio
import torch

from weightsync.backend import create_nccl
from weightsync.budget import SEGMENT_BYTES, Budget, rounded
from weightsync.engine import Engine, Share
from weightsync.errors import PlanError, UnsupportedError, WeightSyncError
from weightsync.filling import Filler
from weightsync.lane import Lane, new_stream, translated
from weightsync.packing import count_puts, pack
from weightsync.runtime import in_thread
from weightsync.sending import Parcel
from weightsync.staging import StagedSending, Staging
from weightsync.store import serve_store
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.announcing import EngineName
    from weightsync.engine import Goods, ResultT
    from weightsync.operation import Operation
    from weightsync.plan import Run
    from weightsync.sending import Sending
    from weightsync.slots import Slots

WAIT_SECONDS: Final = 30.0
"""Limit for an operation whose signals are known to be sent. It ends the link."""

_AT_ONCE: Final = 0.001


class NcclEngine(Engine):
    """NCCL on one device. Raises UnsupportedError where there is none."""

    name: ClassVar[EngineName] = "nccl"
    announced = True

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        segment: int | None = None,
        budget: Budget | None = None,
        sources: Sequence[Tensor] = (),
    ) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("engine 'nccl' needs a GPU, and there is none")
        number = torch.cuda.current_device() if device is None else device.index
        self.device = torch.device("cuda", number)
        self._lock: Final = threading.Lock()
        self._allocating: Final = threading.Lock()
        self._staging: Staging | None = None
        self._filler: Filler | None = None
        self._budget: Final = budget or Budget(None)
        self.segment = SEGMENT_BYTES if segment is None else segment
        self.sources = sources
        self._noted: dict[int, Any] = {}
        self._lanes: list[Lane] = []

    def group(
        self,
        *,
        first: bool,  # noqa: ARG002 -- they are all alike.
    ) -> Any:
        """See ``Engine``: with a store of its own, where the others meet its first."""
        store = serve_store(self.host, WAIT_SECONDS)
        return create_nccl(store, enable_reconfigure=True)

    def memory(self, group: Any, nbytes: int) -> Tensor:
        """See ``Engine``."""
        with self.here():
            return self._allocate(group, nbytes)

    def _allocate(self, group: Any, nbytes: int) -> Tensor:
        return Window.allocate(group, nbytes, device=self.device)

    def share(self, group: Any, slots: Sequence[Slots]) -> Share:
        """See ``Engine``: memory that all links share.

        Chunks for the first segments, which are small. For each other one NCCL wants as
        much of this rank as it has, although nobody puts there: that is a filler.
        """
        windows = [one.segments for one in slots]
        count = max([len(window.starts) for window in windows], default=1)
        first = max([window.sizes[0] for window in windows], default=0)
        others = [size for window in windows for size in window.sizes[1:]]
        largest = max(others, default=0)
        with self._allocating:
            try:
                self._budget.check(largest)
                many = count > 1 and not self.sources  # else little is packed
                nbytes = self._budget.chunks(first, cut=many)
            except PlanError as error:
                self.refusal = error
                raise
            staging = self._chunks(group, nbytes)
            fillers = self._filled(group, largest, count - 1)
            self.refusal = None
        return Share([staging.memory, *fillers], staging)

    def filling(self, group: Any, count: int) -> Sequence[Tensor]:
        """See ``Engine``."""
        return Filler(self.memory(group, 1)).tensors(count) if count else ()

    def _chunks(self, group: Any, nbytes: int) -> Staging:
        if self._staging is None or self._staging.memory.numel() < nbytes:
            self._staging = Staging(self.memory(group, nbytes))
        return self._staging

    def _filled(self, group: Any, nbytes: int, count: int) -> Sequence[Tensor]:
        if not count:
            return ()
        if self._filler is None or self._filler.memory.numel() < nbytes:
            memory = self.memory(group, rounded(nbytes))
            self._budget.take(nbytes)  # not before it is there
            self._filler = Filler(memory)
        return self._filler.tensors(count)

    @contextmanager
    def here(self) -> Generator[None]:
        """See ``Engine``; what was given to the device is done at the end."""
        with self.ordered(None):
            yield

    @contextmanager
    def ordered(self, after: Any) -> Generator[None]:
        """See ``Engine``."""
        with translated(), torch.cuda.device(self.device):
            lane = self._take()
            lane.follow(after or ())
            try:
                with torch.cuda.stream(lane.stream):
                    yield
            finally:
                lane.stream.synchronize()
                self._lanes.append(lane)

    @asynccontextmanager
    async def lane(self) -> AsyncGenerator[Lane]:
        """Lend a lane; it is idle when it is given back."""
        lane = self._take()
        try:
            yield lane
        finally:
            await lane.idle()
            self._lanes.append(lane)

    def _take(self) -> Lane:
        """Take a lane that nobody has: as many are made as are used at once."""
        with suppress(IndexError):
            return self._lanes.pop()
        with translated(), torch.cuda.device(self.device):
            return Lane(new_stream())

    def puts(self, runs: Sequence[Run]) -> int:
        """See ``Engine``."""
        return count_puts(runs)

    def parcel(self, goods: Goods) -> Parcel:
        """See ``Engine``."""
        args = goods.runs, goods.base, goods.header
        packed = pack(*args, casts=goods.casts)
        if not self.sources:
            return Parcel(goods.peer, None, (), packed)
        straight = pack(*args, casts=goods.casts, straight=True)
        return Parcel(goods.peer, None, (), straight, packed)

    def sending(
        self,
        window: Window,
        ranks: int,
        scratch: Any,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> Sending:
        """See ``Engine``."""
        return StagedSending(window, ranks, scratch, naming, self)

    async def call(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """See ``Engine``."""
        async with self.lane() as lane:
            return await lane.run(function, *args)

    async def finished(self, operation: Operation) -> None:
        """See ``Engine``."""
        with anyio.move_on_after(WAIT_SECONDS):
            await operation
            return
        await in_thread(operation.wait, _AT_ONCE)  # raises, and ends the link

    def give_up(self, operation: Operation) -> None:
        """See ``Engine``: it is satisfied, and cannot be given up."""

    def read(self, memory: Tensor) -> Tensor:
        """See ``Engine``."""
        return memory.cpu()

    def mark(self) -> Any:
        """See ``Engine``."""
        with translated():
            return (torch.cuda.current_stream(self.device).record_event(),)

    def note(self) -> None:
        """See ``Engine``: the last of each stream, for it comes after the others.

        Where the device has failed that is the error, and whoever comes after it fails.
        """
        stream = torch.cuda.current_stream(self.device)
        with self._lock:
            try:
                with translated():
                    self._noted[stream.cuda_stream] = stream.record_event()
            except WeightSyncError as error:
                self._noted[stream.cuda_stream] = error

    def noted(self) -> Any:
        """See ``Engine``."""
        with self._lock:
            found, self._noted = tuple(self._noted.values()), {}
        return found

    async def settled(self) -> None:
        """See ``Engine``."""
        async with self.lane() as lane:
            lane.follow(self.noted())  # it is idle when all that is done

    async def copy_in(
        self, window: Window, tensors: Sequence[Tensor], runs: Tensor
    ) -> None:
        """See ``Engine``."""
        await self.call(window.copy_in_order, tensors, runs)

    def copies_alone(
        self,
        tensor: Tensor,  # noqa: ARG002 -- all of them are.
    ) -> bool:
        """See ``Engine``: all of them, by torch, whatever becomes of the link."""
        return True
