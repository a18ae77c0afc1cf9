"""An event loop in a thread of its own, where a transport lives.

A transport must answer its peers while the caller's loop is blocked by a training step,
and must survive that loop: successive ``asyncio.run`` calls, other threads, trio. So it
runs in its own loop, and a call from outside is handed over and awaited through an
eventfd, which every event loop can wait for.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from weightsync.errors import ClosedError, TimedOutError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

_logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class _Call:
    """One call handed over to the loop, and the way to its outcome."""

    def __init__(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]):
        self.outcome: Future[Any] = Future()
        self._function = function
        self._args = args
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> None:
        """Run in the loop; the outcome is set when everything is cleaned up."""
        result: Any = None
        try:
            # Made here: a scope belongs to the kind of loop in which it was made.
            with anyio.CancelScope() as scope:
                self._scope = scope
                result = await self._function(*self._args)
        except Exception as error:  # noqa: BLE001 -- raised by whoever asks for it.
            self.outcome.set_exception(error)
        except BaseException:
            self._give_up()
            raise
        else:
            if scope.cancelled_caught:
                self._give_up()
            else:
                self.outcome.set_result(result)

    def cancel(self) -> None:
        """Cancel the call; in the loop, where it began before."""
        if self._scope is not None:
            self._scope.cancel()

    def _give_up(self) -> None:
        self.outcome.set_exception(ClosedError("the call was cancelled"))


class Tasks:
    """Starts tasks in a loop; one that fails unexpectedly is reported."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self.on_crash: Callable[[WeightSyncError], None] | None = None

    def start_soon(
        self, function: Callable[..., Awaitable[Any]], *args: object
    ) -> None:
        """Run a coroutine function soon."""
        self._group.start_soon(self._run, function, args)

    async def _run(
        self, function: Callable[..., Awaitable[Any]], args: tuple[object, ...]
    ) -> None:
        try:
            await function(*args)
        except Exception as error:
            _logger.exception("a task of weightsync failed")
            if self.on_crash is not None:
                message = f"internal failure: {type(error).__name__}: {error}"
                self.on_crash(WeightSyncError(message))


class OwnTasks(Tasks):
    """Tasks of one part of what a loop does; they can be ended before the others."""

    def __init__(self, tasks: Tasks) -> None:
        self.on_crash = None
        self._tasks = tasks
        self._scopes: set[anyio.CancelScope] = set()
        self._ended = False
        self._quiet = anyio.Event()

    def start_soon(
        self, function: Callable[..., Awaitable[Any]], *args: object
    ) -> None:
        """Run a coroutine function soon; nothing once they were ended."""
        if not self._ended:
            scope = anyio.CancelScope()
            self._scopes.add(scope)
            self._tasks.start_soon(self._hold, scope, function, args)

    async def _hold(
        self,
        scope: anyio.CancelScope,
        function: Callable[..., Awaitable[Any]],
        args: tuple[object, ...],
    ) -> None:
        try:
            with scope:
                await function(*args)
        finally:
            self._scopes.discard(scope)
            self._quiet.set()

    async def end(self) -> None:
        """Cancel what runs, and return when all has ended."""
        self._ended = True
        for scope in self._scopes:
            scope.cancel()
        while self._scopes:
            self._quiet = anyio.Event()
            await self._quiet.wait()


EXIT_SECONDS = 2.0
"""How long the end of the process waits for the thread of a transport left open."""

_running: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _end_all() -> None:
    for runtime in list(_running):
        runtime.abandon()


# A thread that is still at work when the interpreter is taken down may crash it.
atexit.register(_end_all)


class Runtime:
    """The thread and its loop. ``close`` ends both; idempotent."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._name = name
        self._closing = False
        self.tasks: Tasks
        started: Future[BlockingPortal] = Future()
        # A daemon, so that a transport that was never closed cannot hold up the exit.
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=name, daemon=True
        )
        self._thread.start()
        self._portal = started.result()
        _running.add(self)

    def __repr__(self) -> str:
        """Show the name and the state."""
        return f"<Runtime {self._name}, {'closed' if self._closing else 'running'}>"

    def _run(self, started: Future[BlockingPortal]) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as group, BlockingPortal() as portal:
                self.tasks = Tasks(group)
                started.set_result(portal)
                await portal.sleep_until_stopped()
                group.cancel_scope.cancel()

        anyio.run(main)

    def check(self) -> None:
        """Raise ClosedError after ``close`` and in a forked child."""
        if os.getpid() != self._pid:
            message = (
                f"{self._name} belongs to process {self._pid} and cannot be used in "
                f"its forked child {os.getpid()}"
            )
            raise ClosedError(message)
        if self._closing:
            raise ClosedError(f"{self._name} is closed")

    def post(self, function: Callable[..., Any], *args: object) -> None:
        """Run a function in the loop soon; from any thread. Nothing once closed."""
        try:
            self.check()
            self._portal.start_task_soon(function, *args)
        except (RuntimeError, ClosedError):
            return

    def call(
        self, function: Callable[..., Awaitable[ResultT]], *args: object
    ) -> ResultT:
        """Run a coroutine function in the loop and block until it is finished."""
        call = self._start(function, args)
        try:
            result: ResultT = call.outcome.result()
        except KeyboardInterrupt:
            self.post(call.cancel)
            raise
        return result

    async def acall(
        self, function: Callable[..., Awaitable[ResultT]], *args: object
    ) -> ResultT:
        """Run a coroutine function in the loop and await it, from any other loop.

        A cancellation is passed on; this returns when the other side has cleaned up.
        """
        call = self._start(function, args)
        await _settled(call.outcome, lambda: self.post(call.cancel))
        result: ResultT = call.outcome.result()
        return result

    def close(self) -> None:
        """End the loop, cancel what runs in it, and wait for the thread."""
        if self._stop() and threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """End the loop at the end of the process; waits briefly only."""
        if self._stop():
            self._thread.join(EXIT_SECONDS)

    def _stop(self) -> bool:
        if self._closing or os.getpid() != self._pid:
            return False
        self._closing = True
        self._portal.start_task_soon(self._portal.stop, True)
        return True

    def _start(
        self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> _Call:
        self.check()
        call = _Call(function, args)
        self._portal.start_task_soon(call.run)
        return call


async def in_thread(
    function: Callable[..., ResultT],
    *args: object,
    cancel: Callable[[], None] = lambda: None,
) -> ResultT:
    """Run a blocking function in a thread of its own; await it from any loop.

    The thread is a daemon and ends with the function. A cancellation calls ``cancel``
    and waits for the thread, so the function must be bounded, or be ended by that or by
    other means (an abort).
    """
    outcome: Future[ResultT] = Future()

    def run() -> None:
        """Run it and keep the outcome."""
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 -- raised by whoever awaits it.
            outcome.set_exception(error)

    threading.Thread(target=run, name="weightsync-blocking", daemon=True).start()
    await _settled(outcome, cancel)
    return outcome.result()


class StuckError(TimedOutError):
    """A thread was left to itself."""


async def in_thread_for(
    seconds: float, function: Callable[..., ResultT], *args: object
) -> ResultT:
    """``in_thread``, but the thread is left to itself where it takes too long.

    For what may block for ever, such as a store whose process is stopped. Raises
    StuckError; a cancellation leaves the thread to itself too.
    """
    outcome: Future[ResultT] = Future()
    late = StuckError(f"no answer within {seconds:g} s")

    def run() -> None:
        """Call it, and tell the outcome to whoever still waits."""
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 -- raised by whoever awaits it.
            settle(outcome, error=error)
        else:
            settle(outcome, result)

    def give_up() -> None:
        """Wait no longer."""
        settle(outcome, error=late)

    threading.Thread(target=run, name="weightsync-blocking", daemon=True).start()
    with anyio.move_on_after(seconds):
        await _settled(outcome, give_up)
    return outcome.result()


def settle(
    outcome: Future[Any], result: object = None, *, error: BaseException | None = None
) -> None:
    """Set an outcome; the first counts."""
    with suppress(InvalidStateError):
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)


class _Ready:
    """An eventfd that may be closed while another thread is about to notify it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def notify(self, _: object) -> None:
        """Make it readable."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close it."""
        with self._lock:
            os.close(self.fd)
            self.fd = -1


async def _settled(outcome: Future[Any], cancel: Callable[[], None]) -> None:
    """Return when a future of another thread is done.

    The first cancellation is passed on by ``cancel``, and raised when the future is
    done; however often the task is cancelled meanwhile.
    """
    cancelled: BaseException | None = None
    ready = _Ready()
    try:
        outcome.add_done_callback(ready.notify)
        while not (cancelled is None and outcome.done()):
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    await anyio.wait_readable(ready.fd)
                break
            except anyio.get_cancelled_exc_class() as error:
                if cancelled is None:
                    cancelled = error
                    cancel()
    finally:
        ready.close()
    if cancelled is not None:
        outcome.exception()
        raise cancelled
