"""What processes leave behind: counted in /proc and /dev/shm."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from ctypes import byref, c_size_t
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.emulator.abi import everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# As csrc/shm/segment.cpp names the memory that ranks share.
SEGMENT = "memfd:weightsync "


class Counts(NamedTuple):
    """What this process has: ``memory`` is the bytes in use on devices 0 and 1."""

    descriptors: int
    threads: int
    mappings: int
    memory: int


def counts() -> Counts:
    """Count for a process on the emulator."""
    return Counts(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(Path("/proc/self/maps").read_text().splitlines()),
        device_memory(),
    )


def device_memory() -> int:
    abi = everything()
    used = 0
    for device in (0, 1):
        free, total = c_size_t(), c_size_t()
        abi("cudaSetDevice", device)
        abi("cudaMemGetInfo", byref(free), byref(total))
        used += total.value - free.value
    abi("cudaSetDevice", 0)
    return used


def shared_memory() -> set[str]:
    """The names in /dev/shm, but for those of Python's multiprocessing and torch's."""
    theirs = ("sem.mp-", "torch_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(theirs)}


def sessions() -> dict[int, int]:
    """The session of every process, zombies left out; a rank leads one of its own."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(session)
    return found


def is_dead(pid: int) -> bool:
    """Whether all threads of a process ended: its memory outlives its first one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def segments(pid: int) -> int:
    """How often a process holds memory of ranks: as a descriptor or mapped."""
    names = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # That of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return sum(SEGMENT in name for name in names)


def left_by(
    ranks: Iterable[int], alive: Iterable[int], before: set[str]
) -> dict[str, object]:
    """What is left of ranks and does not go soon; empty where nothing is.

    Args:
        ranks: Their process numbers.
        alive: Processes that go on, and might hold memory of the ranks.
        before: What was in /dev/shm before.
    """
    led = set(ranks)

    def found() -> dict[str, object]:
        held = {pid: segments(pid) for pid in alive}
        left = {
            "processes": led & set(sessions().values()),
            "memory held": {pid: count for pid, count in held.items() if count},
            "/dev/shm": shared_memory() - before,
        }
        return {what: which for what, which in left.items() if which}

    eventually(lambda: not found())
    return found()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether a condition comes true in time; what it is about tells nobody."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
