"""Ranks that come and go leave nothing: no process, memory, thread or descriptor."""

from __future__ import annotations

import gc
import os
from ctypes import byref, c_int, c_void_p
from typing import TYPE_CHECKING

import pytest

from tests.emulator.abi import everything
from tests.emulator.leftovers import Counts, counts, left_by, shared_memory
from weightsync import testing
from weightsync.bench.emulator_abi import (
    INT32,
    SUM,
    SYMMETRIC,
    UINT8,
    WaitDescription,
)

if TYPE_CHECKING:
    from weightsync.bench.emulator_abi import Abi

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("collected"),
]

NBYTES = 1 << 20
# Threads that serve all that follows are started by the first cycles.
WARM_UP = 5
# Arenas and stacks that the C library keeps for a while; fewer than there are cycles.
COMES_AND_GOES = 8


# What ranks do.


def cycle_twice() -> list[int]:
    """Use communicators, streams and windows; return this process and its parent."""
    abi = everything()
    for _ in range(2):
        cycle(abi)
    return [os.getpid(), os.getppid()]


def cycle_often(times: int) -> list[Counts]:
    """Return the counts of this process after the warm-up and at the end."""
    abi = everything()
    found = []
    for number in range(1, times + 1):
        cycle(abi)
        if number in {WARM_UP, times}:
            found.append(counts())
    return found


class Device:
    """A rank that shares the thread of the others: device, stream and window."""

    def __init__(self, abi: Abi, number: int, communicator: int) -> None:
        self.abi = abi
        self.number = number
        self.stream = c_void_p()
        self.memory = c_void_p()
        self.window = c_void_p()
        self.communicator = c_void_p(communicator)
        abi("cudaSetDevice", number)
        abi("cudaStreamCreate", byref(self.stream))
        abi("ncclMemAlloc", byref(self.memory), NBYTES)

    def register(self) -> None:
        memory = (self.communicator, self.memory, NBYTES)
        self.abi("ncclCommWindowRegister", *memory, byref(self.window), SYMMETRIC)

    def reduce(self) -> None:
        memory = (self.memory, self.memory, 1, INT32, SUM)
        self.abi("ncclAllReduce", *memory, self.communicator, self.stream)

    def put(self) -> None:
        target = (UINT8, 1 - self.number, self.window, 64, 0, 0, 0)
        where = (self.communicator, self.stream)
        self.abi("ncclPutSignal", self.memory, 8, *target, *where)

    def wait(self) -> None:
        one = WaitDescription(1, 1 - self.number, 0, 0)
        self.abi("ncclWaitSignal", 1, byref(one), self.communicator, self.stream)
        self.abi("cudaStreamSynchronize", self.stream)

    def deregister(self) -> None:
        self.abi("ncclCommWindowDeregister", self.communicator, self.window)

    def destroy(self) -> None:
        self.abi("ncclCommDestroy", self.communicator)

    def free(self) -> None:
        self.abi("cudaSetDevice", self.number)
        self.abi("ncclMemFree", self.memory)
        self.abi("cudaStreamDestroy", self.stream)


def cycle(abi: Abi) -> None:
    """Make two ranks in one thread, let them talk, and end them."""
    communicators = (c_void_p * 2)()
    abi("ncclCommInitAll", communicators, 2, (c_int * 2)(0, 1))
    devices = [Device(abi, number, communicators[number]) for number in range(2)]
    for step in (Device.register, Device.reduce, Device.put):
        together(abi, devices, step)
    for device in devices:
        device.wait()
    for step in (Device.deregister, Device.destroy):
        together(abi, devices, step)
    for device in devices:
        device.free()


def together(abi: Abi, devices: list[Device], step: object) -> None:
    abi("ncclGroupStart")
    for device in devices:
        step(device)
    abi("ncclGroupEnd")


def open_and_close(times: int) -> list[Counts]:
    """The same through torch, in one of two processes."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        2,
        is_master=device.index == 0,
    )
    found = []
    for number in range(1, times + 1):
        use_group(device, dist.PrefixStore(str(number), store))
        if number in {WARM_UP, times}:
            gc.collect()
            torch.cuda.empty_cache()
            found.append(counts())
            torch.cuda.set_device(device)
    return found


def use_group(device: object, store: object) -> None:
    """Reduce, make a window, put and wait; leave nothing."""
    import torch
    import torch.distributed as dist

    rank = device.index
    dist.init_process_group(
        "nccl2", store=store, rank=rank, world_size=2, device_id=device
    )
    backend = dist.group.WORLD._get_backend(device)
    number = torch.tensor([1]).to(device)
    dist.all_reduce(number)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(backend.mem_allocator)):
        memory = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    window = backend.new_window(memory)
    window.put(memory[:64], 1 - rank, 64, async_op=False)
    window.wait_signal(1 - rank, async_op=False)
    torch.cuda.synchronize()
    del window
    dist.destroy_process_group()


def assert_flat(before: list[int], after: list[int]) -> None:
    """What is left of each cycle is more than what comes and goes by itself."""
    *first, memory = before
    *last, memory_at_the_end = after

    assert all(
        now - then <= COMES_AND_GOES for then, now in zip(first, last, strict=True)
    ), (
        Counts(*before),
        Counts(*after),
    )
    assert memory == memory_at_the_end


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_processes_that_come_and_go_leave_nothing(cycles: int) -> None:
    ((_, nursery),) = testing.emulated(cycle_twice, 1)
    before = shared_memory()
    mine = len(os.listdir("/proc/self/fd"))
    its = len(os.listdir(f"/proc/{nursery}/fd"))
    ranks = []
    for _ in range(cycles):
        found = testing.emulated(cycle_twice, 2)
        assert {nursery} == {parent for _, parent in found}
        ranks += [rank for rank, _ in found]

    assert 2 * cycles == len(ranks)
    assert {} == left_by(ranks, [os.getpid(), nursery], before)
    assert mine == len(os.listdir("/proc/self/fd"))
    assert its == len(os.listdir(f"/proc/{nursery}/fd"))


def test_communicators_that_come_and_go_in_one_process_leave_nothing() -> None:
    ((before, after),) = testing.emulated(cycle_often, 1, args=[200])

    assert_flat(before, after)
    assert 0 == after[-1]


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_groups_of_torch_that_come_and_go_leave_nothing(cycles: int) -> None:
    for before, after in testing.emulated(open_and_close, 2, args=[cycles]):
        assert_flat(before, after)
