"""Operation: something one-sided under way, which one awaits or waits for."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
from torch._C._distributed_c10d import ErrorType
from torch.distributed import DistBackendError

from weightsync.errors import PeerError, TimedOutError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

FOREVER: Final = timedelta(days=3650)

_FAULTS: Final[Mapping[ErrorType, type[WeightSyncError]]] = {
    ErrorType.TIMEOUT: TimedOutError,
    ErrorType.REMOTE_ERROR: PeerError,
}


class Operation:
    """Something one-sided under way: await it, or ``wait`` for it on this thread.

    Awaiting works on asyncio and trio, and takes no thread with backends of weightsync:
    who is through writes to a descriptor. A cancelled await gives the operation up; a
    put that was given up has stopped reading its source when the await ends. What NCCL
    was given it does not give back: there a cancelled await ends at once, the operation
    goes on, and an error or a wait that is out of time ends the whole group.
    """

    def __init__(self, work: Any, backend: Any = None) -> None:
        self._work = work
        self._backend = backend
        self._stoppable = getattr(work, "can_be_given_up", False)

    def __await__(self) -> Generator[Any, Any, None]:
        """Wait in an event loop. Raises what ``wait`` raises."""
        return self._finish().__await__()

    def wait(self, timeout: float | None = None) -> None:
        """Block until finished, at most ``timeout`` seconds.

        Raises TimedOutError, PeerError when the peer is gone, ClosedError when the
        window or the operation was given up.
        """
        with self._ours():
            self._wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            self._work.wait(timedelta(seconds=timeout))
        elif self._stoppable:
            self._work.wait()
        else:
            # Without a time, work of a GPU makes only the stream wait.
            self._work.wait(FOREVER)

    @contextmanager
    def _ours(self) -> Generator[None]:
        """Raise what c10d raises as an error of weightsync."""
        try:
            yield
        except DistBackendError as error:
            raise self._fault()(str(error)) from error

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
        with self._ours():
            ready = self._work.fileno()
        try:
            await anyio.wait_readable(ready)
        except anyio.get_cancelled_exc_class():
            if self._stoppable:
                self.abort()
                with anyio.CancelScope(shield=True):
                    await anyio.wait_readable(ready)
            raise
        self.wait()


class Operations(Operation):
    """Several operations as one."""

    def __init__(self, each: Sequence[Operation]) -> None:
        super().__init__(None)
        self._each = each

    def wait(self, timeout: float | None = None) -> None:
        """See ``Operation``; the time is that of each."""
        for each in self._each:
            each.wait(timeout)

    def done(self) -> bool:
        """See ``Operation``."""
        return all(each.done() for each in self._each)

    def abort(self) -> None:
        """See ``Operation``."""
        for each in self._each:
            each.abort()

    async def _finish(self) -> None:
        for each in self._each:
            await each
