"""The processes of rl_loop.py: started, followed to the end, named if they fail."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chaos import Chaos
    from options import Options
    from task import Samples

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 60.0  # seconds that any process waits for another


@dataclass(frozen=True)
class Job:
    """What every process is given."""

    options: Options
    samples: Samples
    weights_address: str
    gradients_address: str


class RunError(Exception):
    """A process failed, or the run took too long; the message says which."""


@dataclass
class Child:
    """A process that we started, and the pipe it reports through."""

    name: str
    process: multiprocessing.process.BaseProcess
    reports: Connection
    ended: bool = False

    def finish(self) -> None:
        """To be called when its pipe has closed; raises unless it ended well."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        if code == 0:
            return
        how = "hangs at its end" if code is None else "failed"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise RunError(f"{self.name} (pid {self.process.pid}) {how}")

    def stop(self) -> None:
        """End it whatever it does."""
        self.process.terminate()
        self.process.join(5)
        self.process.kill()
        self.process.join(5)
        self.reports.close()


def child_main(
    target: Callable[[int, Connection, Job], None],
    index: int,
    reports: Connection,
    job: Job,
) -> None:
    """What every child process runs."""
    # Ctrl-C reaches the whole process group; the main process ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    target(index, reports, job)


def start(
    name: str, target: Callable[[int, Connection, Job], None], index: int, job: Job
) -> Child:
    """Start one process."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    arguments = (target, index, theirs, job)
    process = SPAWN.Process(target=child_main, name=name, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return Child(name, process, ours)


def free_addresses(count: int) -> list[str]:
    """Different addresses of this host that nobody listens at."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in servers]
    for each in servers:
        each.close()
    return addresses


def follow(
    trainers: list[Child], generators: list[Child], chaos: Chaos | None, limit: float
) -> Iterator[Any]:
    """Yields what the children report, until the last of them has ended well."""
    deadline = time.monotonic() + limit
    while not all(child.ended for child in trainers + generators):
        if time.monotonic() > deadline:
            raise RunError(f"it was not over within {limit:.0f} s")
        learning = not all(trainer.ended for trainer in trainers)
        if chaos is not None:
            chaos.act() if learning else chaos.finish()
        running = [child for child in trainers + generators if not child.ended]
        pipes = {child.reports: child for child in running}
        for pipe in wait(list(pipes), timeout=1.0 if chaos is None else 0.05):
            child = pipes[pipe]
            try:
                yield child.reports.recv()
            except (EOFError, OSError):
                child.ended = True
                if chaos is None or not (learning and chaos.replaces(child)):
                    child.finish()
