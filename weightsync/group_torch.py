"""A process group of torch's own backend "nccl2", with the face that links ask for."""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, ReconfigureOptions

from weightsync.errors import ClosedError, PeerError, TimedOutError, UnsupportedError
from weightsync.runtime import settle
from weightsync.store import serve_store

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKING: Final = "NCCL_COMM_BLOCKING"

_STORE_SECONDS: Final = 30.0
"""Limit of the store for what has none of its own."""

_ABORT_SECONDS: Final = 3.0
"""How long an abort is waited for; then it goes on aside."""


def create_torch(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group of torch's own, which its members still have to form.

    An operation that is out of time then ends the group, and not the process.

    Raises UnsupportedError where torch lacks it, and where NCCL is not told to make
    communicators whose calls return when they are done: torch takes a window before
    NCCL is through with it.
    """
    backend = getattr(dist.distributed_c10d, "ProcessGroupNCCL2", None)
    if backend is None:
        raise UnsupportedError("this torch is built without its process group nccl2")
    if os.environ.get(_BLOCKING) != "1":
        message = f"windows of torch's nccl2 need {_BLOCKING}=1 in the environment"
        raise UnsupportedError(message)
    options = backend.Options()
    options.enable_reconfigure = True
    options._timeout = timeout
    return backend(store, rank, size, options)


class TorchGroup:
    """One group, for one link. It is made when its members are known.

    torch wants a store that all members have in common. The member that is to be the
    first opens one, on a free port of its ``host``, and names it in its handle.
    """

    def __init__(self, device: torch.device, host: str, *, first: bool) -> None:
        self._device: Final = device
        self._timeout = timedelta(minutes=10)
        self._backend: Any = None
        self._ended = threading.Event()
        self._formed: Final[Future[Any]] = Future()
        self._server = serve_store(host, _STORE_SECONDS) if first else None
        place = f"{host}:{self._server.port}" if self._server is not None else ""
        self._handle: Final = f"{uuid.uuid4().hex}@{place}"
        self.quarantined = False

    supports_window: Final = True

    def name(self) -> str:
        """Of the backend."""
        return "nccl2"

    def get_reconfigure_handle(self) -> str:
        """Return what the others have to know of this member."""
        return self._handle

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of operations, before the group is formed."""
        self._timeout = timeout

    def reconfigure(self, options: ReconfigureOptions) -> Any:
        """Meet the members. Blocks, until all are there or this is aborted.

        NCCL waits for ever for a member that has died meanwhile: that call is left to
        itself then, in a thread of its own.
        """
        aside = threading.Thread(target=self._meet, args=(options,), daemon=True)
        aside.start()
        try:
            return self._formed.result(_limit_of(options).total_seconds())
        except TimeoutError:
            raise TimedOutError("the members of a link did not meet in time") from None

    def _meet(self, options: ReconfigureOptions) -> None:
        try:
            with torch.cuda.device(self._device):
                work = self._reconfigure(options)
                work.wait()
        except Exception as error:  # noqa: BLE001 -- raised by whoever waits.
            settle(self._formed, error=error)
        else:
            settle(self._formed, work)

    def _reconfigure(self, options: ReconfigureOptions) -> Any:
        handles = list(options.handles)
        host, _, port = handles[0].partition("@")[2].rpartition(":")
        store: dist.Store = dist.TCPStore(
            host, int(port), None, False, _limit_of(options), wait_for_workers=False
        )
        rank = handles.index(self._handle)
        store = dist.PrefixStore(f"link/{options.uuid}", store)
        self._backend = create_torch(store, rank, len(handles), self._timeout)
        mine = ReconfigureOptions()
        mine.uuid, mine.timeout = options.uuid, options.timeout
        store.set(f"handle/{rank}", self._backend.get_reconfigure_handle())
        keys = [f"handle/{each}" for each in range(len(handles))]
        mine.handles = [store.get(key).decode() for key in keys]
        return self._backend.reconfigure(mine)

    def rank(self) -> int:
        """Of this member."""
        return int(self._backend.rank())

    def size(self) -> int:
        """How many members there are."""
        return int(self._backend.size())

    def new_window(self, tensor: Tensor) -> Any:
        """Register memory with all members."""
        return self._backend.new_window(tensor)

    def get_error(self) -> ErrorType:
        """What befell the group."""
        found: ErrorType = self._backend.get_error()
        return found

    def check(self) -> None:
        """Raise what has ended the group, if something has."""
        if self._ended.is_set():
            raise ClosedError("the link was given up")
        error = self.get_error()
        if error == ErrorType.TIMEOUT:
            raise TimedOutError("an operation of torch's nccl2 is out of time")
        if error != ErrorType.SUCCESS:
            raise PeerError(f"torch's nccl2 says {error.name}")

    def abort(self) -> None:
        """End every operation. Idempotent; what hangs in it is left to itself."""
        if self._ended.is_set():
            return
        self._ended.set()
        settle(self._formed, error=ClosedError("the link was given up"))
        if self._backend is None:
            return
        aside = threading.Thread(target=self._backend.abort, daemon=True)
        aside.start()
        aside.join(_ABORT_SECONDS)
        self.quarantined = aside.is_alive()


def _limit_of(options: ReconfigureOptions) -> timedelta:
    return options.timeout or timedelta(minutes=10)
