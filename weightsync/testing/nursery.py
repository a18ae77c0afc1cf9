"""The test's side of a nursery: starts it, asks it for ranks, and ends it."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.testing.messages import (
    Ended,
    Job,
    Kill,
    Ready,
    Start,
    encode,
    receive,
)
from weightsync.testing.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts threads when it is imported, and then nobody can fork."""

START_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 5.0
"""How long other ranks may still run when one has failed and nobody waits for them."""
LAST_WORDS_SECONDS: Final = 1.0
"""How long a rank may take to write where it was, before it is killed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the ranks may take; ``patient`` waits for them when one has failed."""

    seconds: float
    patient: bool


class Nursery:
    """A process that has imported torch on the emulator, and forks ranks from itself.

    One call at a time; threads wait for each other. Ends with this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it, and wait until it has imported torch."""
        self.environment = dict(environment)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._said = os.memfd_create("weightsync-nursery")
        self._connection, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "weightsync.testing.nursery_process"),
                    str(theirs.fileno()),
                ],
                env={**self.environment, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )
        self._connection.settimeout(START_SECONDS)
        try:
            message, _ = receive(self._connection)
        except TimeoutError:
            message = None
        if not isinstance(message, Ready):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more: closed, dead, or a parent's."""
        return self._owner != os.getpid() or self._process.poll() is not None

    def close(self) -> None:
        """End it and its ranks. Idempotent; does nothing in a forked child."""
        if self._owner != os.getpid():
            return
        self._connection.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """Return what it wrote itself: why it did not start."""
        return _read(self._said).decode(errors="replace")

    def run(self, job: Job, ranks: int, limits: Limits) -> list[Outcome]:
        """Run a job on ranks, until the last one ended or was killed."""
        with self._lock, ExitStack() as held:
            asked = _memfd(held, "job")
            os.write(asked, msgspec.msgpack.encode(job))
            files = [
                (_memfd(held, "output"), _memfd(held, "result")) for _ in range(ranks)
            ]
            descriptors = [asked, *[each for pair in files for each in pair]]
            socket.send_fds(self._connection, [encode(Start(ranks))], descriptors)
            ended, late = self._wait(ranks, limits)
            return [
                _outcome(rank, ended[rank], files[rank], late=rank in late)
                for rank in range(ranks)
            ]

    def _wait(self, ranks: int, limits: Limits) -> tuple[dict[int, int], set[int]]:
        deadline = time.monotonic() + limits.seconds
        ended: dict[int, int] = {}
        late: set[int] = set()
        while len(ended) < ranks:
            if (left := deadline - time.monotonic()) <= 0:
                self._connection.send(encode(Kill(at_once=bool(late))))
                deadline = time.monotonic() + LAST_WORDS_SECONDS
                late = late or set(range(ranks)) - set(ended)
                continue
            self._connection.settimeout(left)
            try:
                message, _ = receive(self._connection)
            except TimeoutError:
                continue
            if not isinstance(message, Ended):
                raise WeightSyncError(f"the nursery of ranks died: {self.said()}")
            ended[message.rank] = message.exit_code
            if message.exit_code != 0 and not limits.patient:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return ended, late


def _memfd(held: ExitStack, name: str) -> int:
    descriptor = os.memfd_create(f"weightsync-{name}")
    held.callback(os.close, descriptor)
    return descriptor


def _outcome(rank: int, code: int, files: tuple[int, int], *, late: bool) -> Outcome:
    output = _read(files[0]).decode(errors="replace")
    data = _read(files[1])
    result: Any = msgspec.msgpack.decode(data) if code == 0 and data else None
    return Outcome(rank, code, result, output, late and code != 0)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class Nurseries:
    """Keeps the last nursery, for as long as it suits the environment asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Nursery | None = None

    def suited(self, environment: Mapping[str, str]) -> Nursery:
        """Return one with this environment; start it if there is none."""
        with self._lock:
            kept = self._kept
            if kept is not None and not kept.closed:
                if kept.environment == environment:
                    return kept
                kept.close()
            self._kept = Nursery(environment)
            if self._kept.closed:
                raise WeightSyncError(
                    f"no rank can be started on the emulator: {self._kept.said()}"
                )
            atexit.register(self._kept.close)
            return self._kept
