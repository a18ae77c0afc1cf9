"""The yardstick, a plain memcpy into shared memory; and how much memory is in use."""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from weightsync.backend import create_shm
from weightsync.window import Window

if TYPE_CHECKING:
    from torch import Tensor

    from weightsync._C import ProcessGroupShm


class Memcpy:
    """Copies bytes with the C library into memory of the kind that windows are.

    The memory, ``target``, is shared, mapped and resident; it belongs to no window, so
    nothing but the copy is timed.
    """

    def __init__(self, nbytes: int) -> None:
        self._group: Final[ProcessGroupShm] = create_shm(None)
        self.target: Final = Window.allocate(self._group, nbytes)
        self._memcpy: Final[Any] = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._memcpy.restype = ctypes.c_void_p

    def seconds(self, source: Tensor, size: int, offset: int = 0) -> float:
        """Copy a uint8 tensor to ``offset`` in pieces of ``size`` bytes; time it."""
        memcpy, start = self._memcpy, source.data_ptr()
        to = self.target.data_ptr() + offset
        calls = [
            (to + at, start + at, min(size, len(source) - at))
            for at in range(0, len(source), size)
        ]
        began = time.perf_counter()
        for call in calls:
            memcpy(*call)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the group that the memory was allocated with."""
        self._group.shutdown()


class Resident:
    """The resident memory of this process: what it is, and the peak from now on."""

    def __init__(self) -> None:
        # Makes the kernel forget the peak so far.
        Path("/proc/self/clear_refs").write_text("5")
        self._before: Final = _status("VmRSS")

    def rise(self) -> int:
        """Bytes between the beginning and the peak since."""
        return _status("VmHWM") - self._before


def resident_tensor(nbytes: int) -> Tensor:
    """Return ordinary memory with every page present: uint8 of shape (nbytes,)."""
    return torch.ones(nbytes, dtype=torch.uint8)


def available() -> int:
    """Bytes that can be allocated without swapping."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable")


def total() -> int:
    """Bytes of memory of this machine."""
    return _kibibytes(Path("/proc/meminfo"), "MemTotal")


def _status(field: str) -> int:
    return _kibibytes(Path("/proc/self/status"), field)


def _kibibytes(path: Path, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else 0
