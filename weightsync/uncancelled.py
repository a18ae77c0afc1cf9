"""A coroutine that a cancellation asks to end, and does not interrupt."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ResultT = TypeVar("ResultT")


async def to_the_end(
    function: Callable[..., Awaitable[ResultT]],
    *args: object,
    cancel: Callable[[], None],
) -> ResultT:
    """Await a coroutine function; a cancellation calls ``cancel`` and waits for it.

    The cancellation is raised when the function has returned, however it did.
    """
    outcome: Future[ResultT] = Future()
    over = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_tell, cancel, over)
        with anyio.CancelScope(shield=True):
            try:
                outcome.set_result(await function(*args))
            except Exception as error:  # noqa: BLE001 -- raised below, in no group.
                outcome.set_exception(error)
        # Not a cancellation: anyio leaves each in a cycle of references, with all that
        # the function has, until garbage is collected.
        over.set()
    await anyio.lowlevel.checkpoint_if_cancelled()
    return outcome.result()


async def _tell(cancel: Callable[[], None], over: anyio.Event) -> None:
    try:
        await over.wait()
    except anyio.get_cancelled_exc_class():
        cancel()
        raise
