"""What stands beside puts between GPUs: a broadcast, a computation, and the kernels.

The first runs wherever the puts do. The others need kernels, which emulated GPUs do not
run.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from weightsync.bench.memory import resident_tensor
from weightsync.bench.places import are_emulated, place

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from weightsync.bench.runner import Line

REPETITIONS: Final = 7

COPIES: Final = ("Memcpy", "Memset")
"""With which the profiler's names begin of what the copy engine does."""

COMPUTE_SIZE: Final = 4096
"""Rows and columns of the matrices that are multiplied beside the puts."""

GENEROUS: Final = 1.5
"""A computation lasts so many times as long as what it is beside did alone."""


@dataclass(slots=True)
class Besides:
    """What was found; None is what could not be measured here.

    ``broadcasts``: seconds of a broadcast by NCCL, by bytes. ``kernels`` that one burst
    of puts launched. ``overlap``: seconds of a burst beside a computation, by those
    alone.
    """

    emulated: bool
    broadcasts: dict[int, list[float]] = field(default_factory=dict)
    kernels: int | None = None
    overlap: float | None = None


def find(
    memory: Tensor, sizes: Sequence[int], burst: Callable[[], None], rank: int
) -> Besides:
    """Measure, together with all ranks; each calls its own side of a ``burst``.

    ``memory`` is what a broadcast sends. Figures are those of rank 0.
    """
    found = Besides(are_emulated())
    for size in sizes:
        found.broadcasts[size] = _broadcasts(memory[:size])
    if not found.emulated:
        dist.barrier()
        with counted_kernels() as kernels:
            burst()
        found.kernels = kernels.count
        found.overlap = _overlap(burst, computing=rank == 0)
    return found


def broadcast(_: Line, rank: int, ranks: int, nbytes: int, store: str) -> list[float]:
    """Be a rank of a group that does nothing but broadcast; return the seconds."""
    here = place("nccl", rank)
    meeting = dist.FileStore(store, ranks)
    dist.init_process_group(
        here.backend,
        store=meeting,
        rank=rank,
        world_size=ranks,
        device_id=here.bound,
    )
    found = _broadcasts(resident_tensor(nbytes).to(here.device))
    dist.destroy_process_group()
    return found


def _broadcasts(memory: Tensor) -> list[float]:
    def once() -> None:
        dist.broadcast(memory, 0)

    return [_seconds(once) for _ in range(REPETITIONS)]


def _seconds(function: Callable[[], Any]) -> float:
    """Time what the current stream is given, from when all ranks are ready."""
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


@dataclass(slots=True)
class Kernels:
    """How many there were; None where the profiler did not see our own one."""

    count: int | None = None


@contextmanager
def counted_kernels() -> Generator[Kernels]:
    """Count what this process launches meanwhile, on any stream and thread."""
    found, number = Kernels(), torch.ones(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        number.add_(1)  # shows that the profiler sees any
        yield found
        torch.cuda.synchronize()
    names = [
        event.name
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    kernels = [name for name in names if not name.startswith(COPIES)]
    found.count = len(kernels) - 1 if kernels else None


def _overlap(burst: Callable[[], None], *, computing: bool) -> float:
    alone = _seconds(burst)
    compute = Computation(alone) if computing else None

    def beside() -> None:
        if compute is not None:
            compute.start()
        burst()

    return _seconds(beside) / alone


class Computation:
    """Multiplications on a stream of their own, beside what takes ``seconds`` alone."""

    def __init__(self, seconds: float) -> None:
        shape = (COMPUTE_SIZE, COMPUTE_SIZE)
        self._left: Final = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        self._out: Final = torch.empty_like(self._left)
        self._stream: Final = torch.cuda.Stream()  # type: ignore[no-untyped-call] # of torch
        self._count = 1
        self._timed()  # what the first one prepares
        self._count = max(round(GENEROUS * seconds / self._timed()), 1)

    def _timed(self) -> float:
        began = time.perf_counter()
        self.start()
        self._stream.synchronize()
        return time.perf_counter() - began

    def start(self) -> None:
        """Begin, beside whatever else the GPU does."""
        with torch.cuda.stream(self._stream):
            for _ in range(self._count):
                torch.mm(self._left, self._left, out=self._out)
