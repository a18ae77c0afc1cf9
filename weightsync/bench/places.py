"""Where the ranks of a case are: CPUs over shared memory, or GPUs over NCCL.

Where there is no GPU, cases of engine "nccl" run on the emulator, and say so.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from weightsync import testing
from weightsync.backend import NCCL, SHM
from weightsync.bench.memory import Memcpy, resident_tensor
from weightsync.bench.patterns import fill
from weightsync.errors import UnsupportedError
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor

    from weightsync.announcing import EngineName

ENGINES: Final[tuple[EngineName, ...]] = ("shm", "nccl")

EMULATED_NAME: Final = "weightsync emulated"
"""With which the names of emulated GPUs begin."""


class Copying(ABC):
    """A plain copy of the same bytes into ``target``, timed: the yardstick."""

    target: Tensor

    @abstractmethod
    def seconds(self, source: Tensor, size: int, offset: int = 0) -> float:
        """Copy a uint8 tensor to ``offset`` in pieces of ``size`` bytes; time it."""

    @abstractmethod
    def close(self) -> None:
        """Let the memory go."""


class _HostCopying(Copying):
    def __init__(self, nbytes: int) -> None:
        self._memcpy: Final = Memcpy(nbytes)
        self.target = self._memcpy.target

    def seconds(self, source: Tensor, size: int, offset: int = 0) -> float:
        return self._memcpy.seconds(source, size, offset)

    def close(self) -> None:
        self._memcpy.close()


class _DeviceCopying(Copying):
    """Copies within one GPU, by its copy engine."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def seconds(self, source: Tensor, size: int, offset: int = 0) -> float:
        pieces = [
            (self.target[offset + at : offset + at + len(part)], part)
            for at, part in zip(
                range(0, len(source), size), torch.split(source, size), strict=True
            )
        ]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, part in pieces:
            target.copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        self.target = torch.empty(0)


class Place(ABC):
    """The place of one rank. Memory is uint8 of shape (nbytes,), resident."""

    backend: ClassVar[str]
    device: torch.device
    bound: torch.device | None
    """The device that a process group is bound to."""

    @abstractmethod
    def window(self, group: Any, nbytes: int) -> tuple[Tensor, Tensor]:
        """Allocate a window, and memory of that size which may be put from."""

    @abstractmethod
    def fill(self, memory: Tensor, *key: int) -> None:
        """Write the pattern of a key; it is there when this returns."""

    @abstractmethod
    def host(self, memory: Tensor) -> Tensor:
        """Return bytes where the CPU can compare them."""

    @abstractmethod
    def copying(self, nbytes: int) -> Copying:
        """Return the yardstick for so many bytes."""


class HostPlace(Place):
    """Shared memory."""

    backend = SHM
    device = torch.device("cpu")
    bound = None

    def window(self, group: Any, nbytes: int) -> tuple[Tensor, Tensor]:
        """See ``Place``."""
        return Window.allocate(group, nbytes), resident_tensor(nbytes)

    def fill(self, memory: Tensor, *key: int) -> None:
        """See ``Place``."""
        fill(memory, *key)

    def host(self, memory: Tensor) -> Tensor:
        """See ``Place``."""
        return memory

    def copying(self, nbytes: int) -> Copying:
        """See ``Place``."""
        return _HostCopying(nbytes)


class DevicePlace(Place):
    """One GPU for each rank, or several ranks to a GPU where there are too few."""

    backend = NCCL

    def __init__(self, rank: int) -> None:
        # NCCL asks for this when it is first used, and else refuses to share a GPU.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        self.bound = self.device
        torch.cuda.set_device(self.device)

    def window(self, group: Any, nbytes: int) -> tuple[Tensor, Tensor]:
        """See ``Place``: NCCL puts from what is registered, so one is half of both."""
        both = Window.allocate(group, 2 * nbytes, device=self.device)
        return both, both[nbytes:]

    def fill(self, memory: Tensor, *key: int) -> None:
        """See ``Place``."""
        values = torch.empty(len(memory), dtype=torch.uint8)
        fill(values, *key)
        memory.copy_(values)
        torch.cuda.synchronize()

    def host(self, memory: Tensor) -> Tensor:
        """See ``Place``."""
        return memory.cpu()

    def copying(self, nbytes: int) -> Copying:
        """See ``Place``."""
        return _DeviceCopying(nbytes, self.device)


def place(engine: EngineName, rank: int) -> Place:
    """Return the place of a rank, which has a process of its own."""
    return HostPlace() if engine == "shm" else DevicePlace(rank)


def are_emulated() -> bool:
    """Whether the GPUs of this process are none."""
    return torch.cuda.get_device_name(0).startswith(EMULATED_NAME)


def has_kernels(engine: EngineName) -> bool:
    """Whether ranks of this engine can compute: not on GPUs that will be emulated."""
    return engine == "shm" or torch.cuda.is_available()


def variables(engine: EngineName, ranks: int) -> Mapping[str, str] | None:
    """Return what the environment of so many ranks needs; None if none of its own.

    Ranks without GPUs get emulated ones. Raises UnsupportedError where there are
    neither GPUs nor the emulator.
    """
    if engine == "shm":
        return None
    if torch.cuda.is_available():
        return {}
    if reason := testing.reason():
        raise UnsupportedError(f"engine 'nccl' needs GPUs, or the emulator: {reason}")
    return testing.environment(gpus=ranks)
