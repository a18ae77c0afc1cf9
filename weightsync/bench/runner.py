"""Real processes that measure, and the one that tells them when."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import time
import traceback
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

import anyio
import torch

from weightsync.bench.patterns import VerificationError
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from typing import Self

    AnyConnection = Connection[Any, Any]

END_SECONDS: Final = 10.0
"""How long a child that was killed, or has closed its line, may take to end."""

LEAVE_SECONDS: Final = 1.0
"""How long a child may take to notice that the run is over, before it is killed."""


class RunError(WeightSyncError):
    """A process of the benchmark failed; the message says how."""


class Line:
    """A child's end of the line to the process that directs the benchmark."""

    def __init__(self, connection: AnyConnection) -> None:
        self._connection: Final = connection

    def tell(self, what: object) -> None:
        """Say something."""
        self._connection.send(("told", what))

    async def hear(self) -> Any:
        """Wait for a word without blocking the event loop."""
        return await anyio.to_thread.run_sync(self._connection.recv)


def _main(
    connection: AnyConnection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # A director that has gone has killed this process or is about to.
    with suppress(BrokenPipeError):
        connection.send(_outcome(connection, function, args))


def _outcome(
    connection: AnyConnection, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[str, Any]:
    try:
        result = function(Line(connection), *args)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except VerificationError as error:
        return "wrong", str(error)
    except BaseException:  # noqa: BLE001 -- the director raises it
        return "raised", traceback.format_exc()
    return "returned", result


class Child:
    """A process that runs one function, plain or ``async``."""

    def __init__(
        self, name: str, process: BaseProcess, connection: AnyConnection
    ) -> None:
        self.name: Final = name
        self.connection: Final = connection
        self._process: Final = process

    def tell(self, what: object) -> None:
        """Say something to the child."""
        self.connection.send(what)

    def next(self) -> Any:
        """Return what the child says next; raises what it failed with. May block."""
        try:
            kind, what = self.connection.recv()
        except EOFError:
            self._process.join(END_SECONDS)
            code = self._process.exitcode
            raise RunError(f"{self.name} ended with exit code {code}") from None
        if kind == "wrong":
            raise VerificationError(f"{self.name}: {what}")
        if kind == "raised":
            raise RunError(f"{self.name} failed:\n{what}")
        return what

    def kill(self) -> None:
        """Kill it, also if it is stopped, and wait for its end."""
        self._process.kill()
        self._process.join(END_SECONDS)

    def end(self) -> None:
        """Let it end if it is about to; kill it otherwise."""
        self.connection.close()
        self._process.join(LEAVE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(END_SECONDS)
        self._process.close()


class Processes:
    """The processes of one case: a context that leaves none behind.

    With ``variables`` of an environment of their own they begin anew; else they are
    forked from a server that has imported everything already and has no threads, which
    takes milliseconds.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        forked = variables is None
        self._variables: Final = dict(variables or {})
        self._context: Final[Any] = multiprocessing.get_context(
            "forkserver" if forked else "spawn"
        )
        if forked:
            preload = [
                "torch",
                "weightsync.bench.put_signal",
                "weightsync.bench.push_ranks",
                "weightsync.bench.plan_ranks",
                "weightsync.bench.elastic_ranks",
            ]
            self._context.set_forkserver_preload(preload)
        self._children: Final[list[Child]] = []

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process that was started."""
        for child in self._children:
            child.end()

    def start(self, name: str, function: Callable[..., Any], *args: object) -> Child:
        """Run ``function(line, *args)`` in a process of its own."""
        mine, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_main, args=(theirs, function, args), name=name, daemon=True
        )
        with _environment(self._variables):
            process.start()
        theirs.close()
        child = Child(name, process, mine)
        self._children.append(child)
        return child

    def gather(self, children: Sequence[Child], timeout: float) -> list[Any]:
        """Return what each of them says next; raises at once what one failed with."""
        deadline = time.monotonic() + timeout
        said: dict[str, Any] = {}
        while missing := [child for child in children if child.name not in said]:
            left = deadline - time.monotonic()
            ready = wait([child.connection for child in missing], max(left, 0.0))
            if not ready:
                names = ", ".join(child.name for child in missing)
                raise RunError(f"{names} said nothing for {timeout:.0f} s")
            for child in missing:
                if child.connection in ready:
                    said[child.name] = child.next()
        return [said[child.name] for child in children]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Let processes that start now have these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
