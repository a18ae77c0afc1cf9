"""Window: the SEPARATE-mode face of any c10d window.

Puts and signals are one-sided; nothing here reads remote memory. Everything above this
file knows only what is here, not which engine is below. Offsets and sizes are bytes.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import torch
from torch._C._distributed_c10d import (
    ErrorType,
    WaitSignalOptions,
    WindowAccessType,
)
from torch.distributed import DistBackendError

from weightsync.errors import (
    ClosedError,
    EpochError,
    PeerError,
    PlanError,
    TimedOutError,
    UnsupportedError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Backend, ProcessGroup, Work

RUN_COLUMNS: Final = 7
"""Index of the tensor, offset in it, offset in the window, rows, bytes of a row, stride
in the tensor, stride in the window: the columns of a table of runs."""

FOREVER: Final = timedelta(days=3650)

_FAULTS: Final[Mapping[ErrorType, type[WeightSyncError]]] = {
    ErrorType.TIMEOUT: TimedOutError,
    ErrorType.REMOTE_ERROR: PeerError,
}


class Operation:
    """Something one-sided under way: await it, or ``wait`` for it on this thread.

    Awaiting works on asyncio and trio. A cancelled await gives the operation up; a put
    that was given up has stopped reading its source when the await ends. What NCCL was
    given it does not give back: there a cancelled await ends at once, the operation
    goes on, and an error or a wait that is out of time ends the whole group.
    """

    def __init__(self, work: Any, backend: Any = None) -> None:
        self._work = work
        self._backend = backend

    def __await__(self) -> Generator[Any, Any, None]:
        """Wait in an event loop. Raises what ``wait`` raises."""
        return self._finish().__await__()

    def wait(self, timeout: float | None = None) -> None:
        """Block until finished, at most ``timeout`` seconds.

        Raises TimedOutError, PeerError when the peer is gone, ClosedError when the
        window or the operation was given up.
        """
        try:
            self._wait(timeout)
        except DistBackendError as error:
            raise self._fault()(str(error)) from error

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            self._work.wait(timedelta(seconds=timeout))
        elif hasattr(self._work, "fileno"):
            self._work.wait()
        else:
            # Without a time, work of a GPU makes only the stream wait.
            self._work.wait(FOREVER)

    def _fault(self) -> type[WeightSyncError]:
        """c10d has one class for all that befalls a group, which knows more."""
        with suppress(RuntimeError, AttributeError):
            return _FAULTS.get(self._backend.get_error(), WeightSyncError)
        return WeightSyncError

    def done(self) -> bool:
        """Whether it is finished, well or not."""
        return bool(self._work.is_completed())

    def abort(self) -> None:
        """Give it up. A wait has then taken no signal; a put has sent none.

        Raises RuntimeError on a GPU, where only the whole group can be aborted.
        """
        abort = getattr(self._work, "abort", None)
        if abort is not None:
            abort()

    async def _finish(self) -> None:
        if not hasattr(self._work, "fileno"):
            await anyio.to_thread.run_sync(self.wait, abandon_on_cancel=True)
            return
        ready = self._work.fileno()
        try:
            await anyio.wait_readable(ready)
        except anyio.get_cancelled_exc_class():
            self.abort()
            with anyio.CancelScope(shield=True):
                await anyio.wait_readable(ready)
            raise
        self._work.wait()


class Window:
    """Memory of this rank that the other ranks of a process group may put into.

    Args:
        group: a process group, or backend, with windows (``weightsync-shm``, or any
            other c10d backend that offers them).
        tensor: one-dimensional uint8, from ``Window.allocate``, at the base of its
            allocation. Every rank registers one. NCCL refuses a put that begins beyond
            what the calling rank has registered itself, so on GPUs a rank that puts
            needs as large a one as those that it puts to.

    Creating and closing a window is collective. Its memory begins in an access epoch:
    ``local`` may be read. ``expose`` opens an exposure epoch, in which peers may put
    and ``local`` raises; ``conceal`` ends it.

    Raises UnsupportedError where the group has no windows, its windows are not in
    SEPARATE mode, or the memory cannot be one; PlanError for any other tensor that
    cannot be a window, such as one on another device.
    """

    def __init__(self, group: ProcessGroup | Backend, tensor: Tensor) -> None:
        self._group: Any = group
        self._closed = False
        self._exposed = False
        if not group.supports_window:
            raise UnsupportedError(f"the process group {group.name()!r} has no windows")
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            message = (
                "a window is a one-dimensional uint8 tensor, not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
            raise PlanError(message)
        self._tensor = tensor
        self._window: Any = group.new_window(tensor)
        self._batched = hasattr(self._window, "put_many")
        self._backend: Any = self._group
        if hasattr(self._group, "_get_backend"):
            self._backend = self._group._get_backend(tensor.device)
        access = self._window.get_attr(self.rank).access_type
        if access != WindowAccessType.SEPARATE:
            message = f"this window is in {access.name} mode, SEPARATE is required"
            raise UnsupportedError(message)

    def __repr__(self) -> str:
        """Show rank, size and epoch."""
        state = "closed" if self._closed else "exposed" if self._exposed else "readable"
        return f"<Window rank {self.rank} of {self.size}, {self.nbytes} bytes, {state}>"

    def __enter__(self) -> Window:
        """Enter; leaving closes the window, which is collective."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the window."""
        self.close()

    @staticmethod
    def allocate(
        group: ProcessGroup | Backend,
        nbytes: int,
        *,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Allocate zeroed memory that can become a window, every page present.

        Raises WeightSyncError when there is not enough memory; never a SIGBUS later.
        On a GPU it is torch's OutOfMemoryError.
        """
        where = torch.device(device)
        backend: Any = group
        if not hasattr(backend, "allocate_tensor"):
            backend = backend._get_backend(where)
        tensor: Tensor = backend.allocate_tensor(
            nbytes, dtype=torch.uint8, device=where
        )
        return tensor

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return int(self._group.rank())

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return int(self._group.size())

    @property
    def nbytes(self) -> int:
        """Size of this rank's window in bytes."""
        return self._tensor.numel()

    @property
    def local(self) -> Tensor:
        """This rank's memory, uint8 of shape (nbytes,).

        Raises EpochError while it is exposed, ClosedError after ``close``.
        """
        self._check_open()
        if self._exposed:
            raise EpochError(
                f"{self!r} may be written by peers now: conceal() it first"
            )
        return self._tensor

    def expose(self) -> None:
        """Open an exposure epoch: peers may put, this rank may not read."""
        self._check_open()
        self._exposed = True

    def conceal(self) -> None:
        """Open an access epoch: this rank may read.

        The caller knows by signals that no put is under way.
        """
        self._check_open()
        self._exposed = False

    def put(self, tensor: Tensor, peer: int, *, offset: int = 0) -> Operation:
        """Write a contiguous tensor into the window of ``peer``, then signal once.

        Starts at byte ``offset`` of that window. The tensor must stay unchanged until
        the operation is finished.

        Raises PlanError when the bytes do not fit, before any is moved. On GPUs also
        for a source that lies in no memory of ``allocate`` that is registered, and
        UnsupportedError for a put that begins beyond this rank's own memory.
        """
        self._check_open()
        return self._issued(self._window.put(as_bytes(tensor), peer, offset, True))

    def put_many(self, tensors: Sequence[Tensor], runs: Tensor, peer: int) -> Operation:
        """Write many runs in one call, then signal once for each row of each run.

        ``runs`` is int64 of shape (n, 7); see ``RUN_COLUMNS``. Each row of a run is one
        put. The tensors must stay unchanged until the operation is finished.

        Raises PlanError when a run leaves its tensor or the window, before any byte
        is moved, and otherwise as ``put`` does.
        """
        self._check_open()
        if runs.dtype != torch.int64 or runs.dim() != 2 or runs.shape[1] != RUN_COLUMNS:
            found = f"{runs.dtype} of shape {tuple(runs.shape)}"
            raise PlanError(f"runs are int64 of shape (n, {RUN_COLUMNS}), not {found}")
        if self._batched:
            signals = int(runs[:, 3].sum())
            return self._issued(
                self._window.put_many(list(tensors), runs, peer, signals, True)
            )
        rows = [self._put_row(tensors, row, peer) for row in _rows(runs)]
        return _All(rows, self._backend)

    def signal(self, peer: int) -> Operation:
        """Signal ``peer`` once, after everything put to it before."""
        self._check_open()
        return self._issued(self._window.signal(peer, True))

    def wait_signal(
        self, peer: int, count: int = 1, *, timeout: float | None = None
    ) -> Operation:
        """Take ``count`` signals of ``peer``; see ``wait_signals``."""
        return self.wait_signals({peer: count}, timeout=timeout)

    def wait_signals(
        self, expected: Mapping[int, int], *, timeout: float | None = None
    ) -> Operation:
        """Take so many signals of each peer: all of them together, or none.

        When it is finished, everything that was put before those signals is here.
        Raises (when awaited) TimedOutError after ``timeout`` seconds, PeerError when a
        peer died before it signalled.
        """
        self._check_open()
        limit = FOREVER if timeout is None else timedelta(seconds=timeout)
        if self._batched:
            peers, counts = list(expected), list(expected.values())
            return self._issued(self._window.wait_signals(peers, counts, limit, True))
        options = WaitSignalOptions()
        options.timeout = limit
        return _All(
            [
                self._window.wait_signal(peer, True, options)
                for peer, count in expected.items()
                for _ in range(count)
            ],
            self._backend,
        )

    def connect(self, peers: Sequence[int]) -> None:
        """Do now what the first put to these ranks would do, such as mapping memory."""
        self._check_open()
        if hasattr(self._window, "connect"):
            self._window.connect(list(peers))

    def prepare(self, runs: Tensor, peer: int) -> None:
        """Do now what the first ``put_many`` of these runs would do, such as touching.

        Raises PlanError when a run leaves the window.
        """
        self._check_open()
        if hasattr(self._window, "prepare"):
            self._window.prepare(runs, peer)

    def copy_out(self, tensors: Sequence[Tensor], runs: Tensor) -> Operation:
        """Copy runs of this rank's own window into tensors."""
        return self._copy(tensors, runs, to_window=False)

    def copy_in(self, tensors: Sequence[Tensor], runs: Tensor) -> Operation:
        """Copy tensors into runs of this rank's own window."""
        return self._copy(tensors, runs, to_window=True)

    def copy_in_order(self, tensors: Sequence[Tensor], runs: Tensor) -> None:
        """Copy as ``copy_in`` does, in the order of the current stream.

        On GPUs it returns when that is issued, else when it is done.
        """
        self._check_open()
        self._window.copy_local(list(tensors), runs, True, False)

    def close(self) -> None:
        """Deregister with all ranks. Idempotent; needs every rank, or times out.

        A group that was aborted or shut down has closed its windows already.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(ClosedError):
            self._window.tensor_deregister()

    def _copy(
        self, tensors: Sequence[Tensor], runs: Tensor, *, to_window: bool
    ) -> Operation:
        self._check_open()
        if not self._batched:
            raise UnsupportedError("local copies need a window of weightsync's own")
        return self._issued(
            self._window.copy_local(list(tensors), runs, to_window, True)
        )

    def _issued(self, work: Any) -> Operation:
        return Operation(work, self._backend)

    def _put_row(self, tensors: Sequence[Tensor], row: _Row, peer: int) -> Work:
        index, start, offset, nbytes = row
        data = as_bytes(tensors[index])
        work: Work = self._window.put(data[start : start + nbytes], peer, offset, True)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this window is closed")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return what a tensor means as bytes: conjugation and sign are lazy in torch."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dimension of size 1 may have any stride, which `view` would not take.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


_Row = tuple[int, int, int, int]


def _rows(runs: Tensor) -> list[_Row]:
    rows: list[_Row] = []
    for index, start, offset, count, nbytes, stride, step in runs.tolist():
        rows += [
            (index, start + i * stride, offset + i * step, nbytes) for i in range(count)
        ]
    return rows


class _All(Operation):
    """Several pieces of c10d work as one operation."""

    def __init__(self, works: Sequence[Any], backend: Any) -> None:
        super().__init__(None)
        self._each = [Operation(work, backend) for work in works]

    def wait(self, timeout: float | None = None) -> None:
        for each in self._each:
            each.wait(timeout)

    def done(self) -> bool:
        return all(each.done() for each in self._each)

    def abort(self) -> None:
        for each in self._each:
            each.abort()

    async def _finish(self) -> None:
        for each in self._each:
            await each
