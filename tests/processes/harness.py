"""Real processes for tests: start functions, talk with them, kill what is left."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
import signal
import socket
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

# Forked from a server that has imported everything already and has no threads: as
# separate as spawned processes, and started in milliseconds instead of seconds.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch._dynamo",  # which FSDP2 and DTensor import when they are used first
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "weightsync",
    "weightsync.backend",
    "weightsync.blocking",
    "weightsync.transport",
    "anyio._backends._asyncio",
]
CONTEXT.set_forkserver_preload(PRELOADED)


class ChildError(Exception):
    """A child raised; the message is its traceback."""


class Control:
    """A child's end of the line to the test; its tensors belong on ``device``."""

    device = "cpu"

    def __init__(self, line: Connection) -> None:
        self._line = line
        self.reach: Callable[[str], None] = lambda what: None
        """Called by driven children: they are about to open, push, receive or close a
        transport, or have done so ("opening", "opened" and so on)."""
        self.calls: dict[str, Callable[..., Awaitable[Any]]] = {}
        """What driven children can be asked for besides their own calls."""

    def say(self, what: object) -> None:
        """Tell the test something."""
        self._line.send(("said", what))

    def hear(self) -> Any:
        """Wait for the test to say something."""
        return self._line.recv()

    async def ahear(self) -> Any:
        """Wait for the test without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.hear)


def _main(
    line: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    control = Control(line)
    try:
        result = function(control, *args)
        if inspect.iscoroutine(result):
            result = anyio.run(lambda: result)
    except BaseException:
        line.send(("raised", traceback.format_exc()))
        raise
    line.send(("returned", result))


class Child:
    """A process that runs one function."""

    PROCESS: Any = CONTEXT.Process

    def __init__(self, name: str, function: Callable[..., Any], args: Any) -> None:
        self.name = name
        self._line, theirs = CONTEXT.Pipe()
        self._process = self.PROCESS(
            target=_main, args=(theirs, function, args), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process number."""
        assert self._process.pid is not None
        return self._process.pid

    def fileno(self) -> int:
        """Let ``multiprocessing.connection.wait`` wait for what the child says."""
        return self._line.fileno()

    def say(self, what: object) -> None:
        """Tell the child something."""
        self._line.send(what)

    def hear(self, timeout: float = 30.0) -> Any:
        """Return the next thing that the child says; raises what it raised."""
        kind, what = self.next(timeout)
        if kind != "said":
            raise ChildError(f"{self.name} returned {what!r} instead of speaking")
        return what

    def refusal(self) -> str:
        """Return what it raises instead of speaking."""
        try:
            said = self.hear()
        except ChildError as error:
            return str(error)
        raise AssertionError(f"{self.name} said {said!r}")

    def poll(self, timeout: float) -> bool:
        """Whether it says something within so many seconds."""
        return self._line.poll(timeout)

    def result(self, timeout: float = 30.0) -> Any:
        """Return what the child's function returned; raises what it raised."""
        while True:
            kind, what = self.next(timeout)
            if kind == "returned":
                self._process.join(timeout)
                return what

    def next(self, timeout: float) -> tuple[str, Any]:
        """Return "said" or "returned", and what; raises what the child raised."""
        if not self._line.poll(timeout):
            raise TimeoutError(f"{self.name} said nothing for {timeout} s")
        try:
            kind, what = self._line.recv()
        except (EOFError, ConnectionResetError):  # the latter where we wrote last
            self._process.join(5)
            code = self._process.exitcode
            raise ChildError(f"{self.name} ended with exit code {code}") from None
        if kind == "raised":
            raise ChildError(f"{self.name} raised:\n{what}")
        return kind, what

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL by default."""
        os.kill(self.pid, number)

    def join(self, timeout: float = 30.0) -> int | None:
        """Wait for the end; return the exit code."""
        self._process.join(timeout)
        return self._process.exitcode

    def end(self) -> None:
        """Kill it if it still runs."""
        with suppress(ProcessLookupError):  # it may end by itself at this moment
            if self._process.is_alive():
                os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)
        self._line.close()
        self._process.close()


class Processes:
    """The children of one test."""

    device = "cpu"
    """Where their tensors are."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(
        self, function: Callable[..., Any], *args: object, name: str | None = None
    ) -> Child:
        """Run ``function(control, *args)``, plain or async, in a process of its own."""
        label = name or f"{function.__name__}-{len(self._children)}"
        child = Child(label, function, args)
        self._children.append(child)
        return child

    def end(self) -> None:
        """Kill what is left."""
        for child in self._children:
            child.end()


def free_address() -> str:
    """Return the address of a port of loopback that nobody listens on.

    It is none that the kernel gives to connections, which could take it meanwhile.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, low)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
