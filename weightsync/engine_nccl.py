"""The engine "nccl": memory of one GPU, moved by the process group of weightsync.

Puts are staged (``staging.py``); nothing here launches a kernel, unless a received
tensor is not contiguous. No wait for signals is issued before it is satisfied, because
nothing ends one that is not.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import HashStore

from weightsync.backend import create_nccl
from weightsync.engine import Engine, Share
from weightsync.errors import UnsupportedError
from weightsync.packing import CHUNK_BYTES, count_puts, pack
from weightsync.runtime import in_thread
from weightsync.sending import Parcel
from weightsync.staging import CHUNKS, StagedSending, Staging, as_ours
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.engine import Goods, ResultT
    from weightsync.plan import Run
    from weightsync.sending import Sending
    from weightsync.window import Operation

WAIT_SECONDS: Final = 30.0
"""Limit for an operation whose signals are known to be sent. It ends the link."""


class NcclEngine(Engine):
    """NCCL on one device. Raises UnsupportedError where there is none."""

    name = "nccl"
    announced = True

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("engine 'nccl' needs a GPU, and there is none")
        number = torch.cuda.current_device() if device is None else device.index
        self.device = torch.device("cuda", number)
        self._lock: Final = threading.Lock()
        self._allocating: Final = threading.Lock()
        self._staging: Staging | None = None
        self._noted: dict[int, Any] = {}
        self._streams: list[torch.cuda.Stream] = []

    def group(self) -> Any:
        """See ``Engine``."""
        return create_nccl(HashStore(), enable_reconfigure=True)

    def memory(self, group: Any, nbytes: int) -> Tensor:
        """See ``Engine``."""
        with self.here():
            return Window.allocate(group, nbytes, device=self.device)

    def share(self, group: Any, largest: int) -> Share:
        """See ``Engine``: the staging memory, which all links share.

        NCCL refuses a put beyond what the rank that puts has registered itself, so it
        is as large as the largest window that a link puts into.
        """
        nbytes = max(largest, CHUNKS * CHUNK_BYTES)
        with self._allocating:
            if self._staging is None or self._staging.memory.numel() < nbytes:
                self._staging = Staging(self.memory(group, nbytes))
            return Share(self._staging.memory, self._staging)

    @contextmanager
    def here(self) -> Generator[None]:
        """See ``Engine``; what was given to the device is done at the end."""
        with self.ordered(None):
            yield

    @contextmanager
    def ordered(self, after: Any) -> Generator[None]:
        """See ``Engine``."""
        with torch.cuda.device(self.device), self._stream() as stream:
            for event in after or ():
                stream.wait_event(event)
            yield

    @contextmanager
    def _stream(self) -> Generator[torch.cuda.Stream]:
        """Use a stream that nobody else does: as many are made as are used at once."""
        with self._lock:
            stream = self._streams.pop() if self._streams else _new_stream()
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            stream.synchronize()
            with self._lock:
                self._streams.append(stream)

    def puts(self, runs: Sequence[Run]) -> int:
        """See ``Engine``."""
        return count_puts(runs)

    def parcel(self, goods: Goods) -> Parcel:
        """See ``Engine``."""
        if goods.casts:
            raise UnsupportedError("engine 'nccl' converts no dtypes yet")
        packed = pack(goods.runs, goods.base, goods.header)
        return Parcel(goods.peer, None, (), packed)

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

        def on_device() -> ResultT:
            """Call it with the device chosen, and wait for what it enqueued."""
            try:
                with self.here():
                    return function(*args)
            except (RuntimeError, ValueError) as error:
                raise as_ours(error) from error

        return await in_thread(on_device)

    def finished(self, operation: Operation) -> Awaitable[None]:
        """See ``Engine``."""
        return in_thread(operation.wait, WAIT_SECONDS)

    def give_up(self, operation: Operation) -> None:
        """See ``Engine``: it is satisfied, and cannot be given up."""

    def read(self, memory: Tensor) -> Tensor:
        """See ``Engine``."""
        return memory.cpu()

    def mark(self) -> Any:
        """See ``Engine``."""
        return (torch.cuda.current_stream(self.device).record_event(),)

    def note(self) -> None:
        """See ``Engine``: the last of each stream, for it comes after the others."""
        stream = torch.cuda.current_stream(self.device)
        with self._lock:
            self._noted[stream.cuda_stream] = stream.record_event()

    def noted(self) -> Any:
        """See ``Engine``."""
        with self._lock:
            found, self._noted = tuple(self._noted.values()), {}
        return found

    async def settled(self) -> None:
        """See ``Engine``."""
        await in_thread(self._settle)

    def _settle(self) -> None:
        with self.ordered(self.noted()):
            pass  # it ends when its stream has done what comes before

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


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call] # of torch
