"""The process of a nursery: imports torch on the emulator, and forks ranks.

Forking costs milliseconds where importing costs seconds. It is safe as long as this
process has one thread and uses no GPU; it checks the first before it says Ready.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from weightsync.testing.messages import (
    Ended,
    Job,
    Kill,
    Ready,
    Start,
    encode,
    receive,
)
from weightsync.testing.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

PRELOADED: Final = ("torch", "torch.distributed", "weightsync", "weightsync.backend")


class _Nursery:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        # The test may be gone while a child of it holds its end of the connection.
        self._parent = os.pidfd_open(os.getppid())
        self._selector.register(self._parent, selectors.EVENT_READ)
        self._pids: dict[int, tuple[int, int]] = {}

    def serve(self) -> Rank:
        """Serve until the test is gone, then end the process; return in ranks only."""
        self._connection.send(encode(Ready()))
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._connection:
                    rank = self._hear()
                    if rank is not None:
                        return rank
                elif key.fileobj == self._parent:
                    self.kill()
                    os._exit(0)
                else:
                    self._reap(key.fd)

    def kill(self) -> None:
        """Kill the ranks that still run, and what they started."""
        for _, pid in self._pids.values():
            _kill_group(pid)

    def abort(self) -> None:
        """Let them say where they are (see faulthandler) and end."""
        for _, pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)

    def _hear(self) -> Rank | None:
        message, descriptors = receive(self._connection)
        if isinstance(message, Start):
            return self._start(message, descriptors)
        if isinstance(message, Kill) and not message.at_once:
            self.abort()
            return None
        self.kill()
        if not isinstance(message, Kill):
            os._exit(0)
        return None

    def _start(self, start: Start, descriptors: list[int]) -> Rank | None:
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            job = msgspec.msgpack.decode(file.read(), type=Job)
        for rank in range(start.ranks):
            output, result = descriptors[1 + 2 * rank : 3 + 2 * rank]
            pid = os.fork()
            if pid == 0:
                self._let_go()
                return Rank(job, _variables(rank, start.ranks), output, result)
            pidfd = os.pidfd_open(pid)
            self._pids[pidfd] = (rank, pid)
            self._selector.register(pidfd, selectors.EVENT_READ)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return None

    def _let_go(self) -> None:
        self._selector.close()
        self._connection.close()
        os.close(self._parent)
        for pidfd in self._pids:
            os.close(pidfd)

    def _reap(self, pidfd: int) -> None:
        rank, pid = self._pids.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        # While it is not waited for, its number cannot be that of another group.
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            code = os.waitstatus_to_exitcode(status)
            self._connection.send(encode(Ended(rank, code)))


def _kill_group(pid: int) -> None:
    # Before its setsid() it is in our group: then it is killed alone.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _variables(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def main(argv: Sequence[str]) -> None:
    """Run with the descriptor of the connection as the only argument."""
    connection = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(connection.fileno(), False)
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"importing torch started {threads - 1} threads: cannot fork")
    # Or every collection of garbage in a rank would copy what is shared.
    gc.freeze()
    # Out of the nursery's own functions: a traceback shows the rank's alone.
    _Nursery(connection).serve().run()


if __name__ == "__main__":
    main(sys.argv[1:])
