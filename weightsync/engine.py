"""Engine: all that differs between shared memory and NCCL, behind one interface.

Links and generators ask it how a process group is made, where window memory comes from,
what becomes of a plan's runs, and how to wait. This is the base and the engine "shm".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

import torch

from weightsync.backend import create_shm
from weightsync.casting import Scratch, batches
from weightsync.sending import Parcel, Sending
from weightsync.slots import HEADER_BYTES, table
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from weightsync.announcing import EngineName
    from weightsync.errors import PlanError
    from weightsync.operation import Operation
    from weightsync.plan import Cast, Run
    from weightsync.slots import Slots

ResultT = TypeVar("ResultT")

LOOPBACK: Final = "127.0.0.1"

TRAINER_WINDOW: Final = 64
"""Bytes of a trainer rank's window: nobody puts into it, but every rank has one."""


class Goods(NamedTuple):
    """What one trainer rank puts to one generator rank, in one slot.

    ``peer`` is its rank in the process group, ``base`` and ``header`` are where the
    slot and the header begin in its window, ``pushed`` is how many tensors are pushed.
    """

    peer: int
    runs: Sequence[Run]
    casts: Sequence[Cast]
    base: int
    header: int
    pushed: int


class Share(NamedTuple):
    """A trainer rank's part of a link: its memory for each segment of those windows.

    And what its transfers need.
    """

    memory: Sequence[Tensor]
    scratch: Any


class Engine(ABC):
    """One engine on one device, for all links of a transport."""

    name: ClassVar[EngineName]
    device: torch.device

    segment: int = 0
    """The most bytes of a segment of a window; 0 where a window is one in any case."""

    sources: Sequence[Tensor] = ()
    """Of each allocation that this rank puts straight from, and registers, a part."""

    refusal: PlanError | None = None
    """Why the last link had no share in the budget of this rank."""

    host: str = LOOPBACK
    """The interface on which the ranks of a link may reach this one to meet."""

    announced: ClassVar[bool]
    """Whether a wait for signals begins only when all of them are known to be sent."""

    @abstractmethod
    def group(self, *, first: bool) -> Any:
        """Make a process group for one link, which has no members yet.

        One of them is to be the ``first``.
        """

    def window(self, group: Any, memory: Tensor) -> Window:
        """Make the window of a group that is formed, as all its ranks do. Blocks."""
        return Window(group, memory)

    @abstractmethod
    def memory(self, group: Any, nbytes: int) -> Tensor:
        """Allocate a segment of the window of a generator rank, zeroed. Blocks.

        Raises WeightSyncError where there is not enough memory.
        """

    @abstractmethod
    def share(self, group: Any, slots: Sequence[Slots]) -> Share:
        """Return the share of a trainer rank that puts into such windows.

        Raises PlanError where its budget is too small for that.
        """

    @abstractmethod
    def filling(self, group: Any, count: int) -> Sequence[Tensor]:
        """Return memory of a generator rank for segments that only others have."""

    @abstractmethod
    def here(self) -> AbstractContextManager[None]:
        """Let this thread work on the device; all is done when it ends."""

    @abstractmethod
    def ordered(self, after: Any) -> AbstractContextManager[None]:
        """As ``here``, after what some ``mark`` has seen."""

    @abstractmethod
    def puts(self, runs: Sequence[Run]) -> int:
        """How many puts, and so how many signals, runs are that need no conversion."""

    @abstractmethod
    def parcel(self, goods: Goods) -> Parcel:
        """Prepare what is put, again and again. Raises UnsupportedError."""

    @abstractmethod
    def sending(
        self,
        window: Window,
        ranks: int,
        scratch: Any,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> Sending:
        """Begin a transfer to so many generator ranks."""

    @abstractmethod
    async def call(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Call what may block on this engine; await it in a loop."""

    @abstractmethod
    def finished(self, operation: Operation) -> Awaitable[None]:
        """Await an operation that was begun."""

    @abstractmethod
    def give_up(self, operation: Operation) -> None:
        """End a wait for signals early, where that is possible."""

    @abstractmethod
    def read(self, memory: Tensor) -> Tensor:
        """Return bytes of window memory where the host can read them. Blocks."""

    @abstractmethod
    def mark(self) -> Any:
        """Return what the caller's thread has given the device to do until now."""

    @abstractmethod
    def note(self) -> None:
        """Mark, for ``noted``. From any thread."""

    @abstractmethod
    def noted(self) -> Any:
        """Return the mark of everything that was noted since the last call."""

    @abstractmethod
    async def settled(self) -> None:
        """Wait until the device has done what was noted."""

    @abstractmethod
    async def copy_in(
        self, window: Window, tensors: Sequence[Tensor], runs: Tensor
    ) -> None:
        """Copy tensors into runs of the own window."""

    @abstractmethod
    def copies_alone(self, tensor: Tensor) -> bool:
        """Whether a received tensor is copied by itself, not in a table of runs."""


class ShmEngine(Engine):
    """Shared memory of one host: sources may lie anywhere, signals can be seen."""

    name = "shm"
    device = torch.device("cpu")
    announced = False

    def group(
        self,
        *,
        first: bool,  # noqa: ARG002 -- they are all alike.
    ) -> Any:
        """See ``Engine``."""
        return create_shm(None, enable_reconfigure=True)

    def memory(self, group: Any, nbytes: int) -> Tensor:
        """See ``Engine``."""
        return Window.allocate(group, nbytes)

    def share(
        self,
        group: Any,
        slots: Sequence[Slots],  # noqa: ARG002 -- they matter to NCCL only.
    ) -> Share:
        """See ``Engine``; nobody puts into the window."""
        return Share([Window.allocate(group, TRAINER_WINDOW)], Scratch())

    def filling(self, group: Any, count: int) -> Sequence[Tensor]:
        """See ``Engine``: windows are one segment each."""
        return [Window.allocate(group, TRAINER_WINDOW) for _ in range(count)]

    def here(self) -> AbstractContextManager[None]:
        """See ``Engine``."""
        return nullcontext()

    def ordered(
        self,
        after: Any,  # noqa: ARG002 -- it is done already.
    ) -> AbstractContextManager[None]:
        """See ``Engine``."""
        return nullcontext()

    def puts(self, runs: Sequence[Run]) -> int:
        """See ``Engine``."""
        return sum([run.rows for run in runs])

    def parcel(self, goods: Goods) -> Parcel:
        """See ``Engine``: all at once, and what is converted in batches."""
        runs = table(goods.runs, goods.base)
        casts = batches(goods.casts, goods.base)
        if not casts:
            runs = and_header(runs, goods.pushed, goods.header)
            return Parcel(goods.peer, runs, ())
        last = and_header(casts[-1].runs, 1, goods.header)
        casts = (*casts[:-1], casts[-1].with_runs(last))
        return Parcel(goods.peer, runs if len(runs) else None, casts)

    def sending(
        self,
        window: Window,
        ranks: int,
        scratch: Any,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> Sending:
        """See ``Engine``."""
        return Sending(window, ranks, scratch, naming)

    async def call(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """See ``Engine``: nothing blocks."""
        return function(*args)

    def finished(self, operation: Operation) -> Awaitable[None]:
        """See ``Engine``."""
        return operation

    def give_up(self, operation: Operation) -> None:
        """See ``Engine``."""
        operation.abort()

    def read(self, memory: Tensor) -> Tensor:
        """See ``Engine``."""
        return memory

    def mark(self) -> Any:
        """See ``Engine``: nothing, what was done is done."""
        return None

    def note(self) -> None:
        """See ``Engine``."""

    def noted(self) -> Any:
        """See ``Engine``."""
        return None

    async def settled(self) -> None:
        """See ``Engine``."""

    async def copy_in(
        self, window: Window, tensors: Sequence[Tensor], runs: Tensor
    ) -> None:
        """See ``Engine``."""
        await window.copy_in(tensors, runs)

    def copies_alone(self, tensor: Tensor) -> bool:
        """See ``Engine``."""
        return not tensor.is_contiguous()


def and_header(runs: Tensor, tensor: int, at: int, start: int = 0) -> Tensor:
    """Append to a table the run that puts the header, at ``start`` of this tensor."""
    last = [tensor, start, at, 1, HEADER_BYTES, HEADER_BYTES, HEADER_BYTES]
    return torch.cat([runs, torch.tensor([last], dtype=torch.int64)])
