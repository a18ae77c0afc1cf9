"""Window: the SEPARATE-mode face of any c10d window.

Puts and signals are one-sided; nothing here reads remote memory. Everything above this
file knows only what is here, not which engine is below. Offsets and sizes are bytes.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import WaitSignalOptions, WindowAccessType

from weightsync.errors import (
    ClosedError,
    EpochError,
    PlanError,
    UnsupportedError,
)
from weightsync.operation import FOREVER, Operation, Operations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Backend, ProcessGroup, Work

RUN_COLUMNS: Final = 7
"""Index of the tensor, offset in it, offset in the window, rows, bytes of a row, stride
in the tensor, stride in the window: the columns of a table of runs."""


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
        return self._all(rows)

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
        return self._all(
            [
                self._window.wait_signal(peer, True, options)
                for peer, count in expected.items()
                for _ in range(count)
            ]
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

    def _all(self, works: Sequence[Any]) -> Operation:
        return Operations([Operation(work, self._backend) for work in works])

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
