"""What the children of test_cuda.py do with torch on emulated GPUs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 8
    assert torch.cuda.get_device_name(7) == "weightsync emulated GPU"
    assert torch.cuda.get_device_capability(3) == (9, 0)
    assert torch.cuda.get_device_properties(0).total_memory == 16 << 30
    assert torch.cuda.can_device_access_peer(0, 7)


def bytes_on_every_device() -> None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        sent = torch.arange(1000, dtype=torch.int32) + index
        held = sent.to(device)
        copied = held.clone()

        assert held.device == device
        assert torch.equal(copied.cpu(), sent)
        assert torch.equal(held, held)
        assert torch.equal(copied.view(10, 100)[3].cpu(), sent[300:400])


def copies_between_devices() -> None:
    sent = torch.arange(1000.0)
    there = sent.to("cuda:5").to("cuda:2")

    assert torch.equal(there.cpu(), sent)


def streams_and_events() -> None:
    pinned = torch.arange(1 << 20).pin_memory()
    stream = torch.cuda.Stream()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    held = torch.empty(1 << 20, dtype=torch.int64, device="cuda")
    with torch.cuda.stream(stream):
        start.record()
        held.copy_(pinned, non_blocking=True)
        end.record()
    held.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    assert pinned.is_pinned()
    assert stream.query()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 10_000
    assert torch.equal(held.cpu(), pinned)


def memory_pools_and_statistics() -> None:
    free, total = torch.cuda.mem_get_info()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    used = torch.cuda.mem_get_info()[0]
    assert (free, total) == (16 << 30, 16 << 30)
    assert used == free - (64 << 20)
    assert torch.cuda.memory_allocated() == 64 << 20
    del held, pool
    torch.cuda.empty_cache()

    assert torch.cuda.mem_get_info()[0] == free


def out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"17\.00 GiB"):
        torch.empty(17 << 30, dtype=torch.uint8, device="cuda")

    assert torch.arange(3).cuda().tolist() == [0, 1, 2]


def a_kernel() -> None:
    held = torch.arange(4.0).cuda()
    with pytest.raises(RuntimeError, match=r"weightsync emulator.*elementwise_kernel"):
        held.add_(1)

    assert torch.equal(held.cpu(), torch.arange(4.0))


def a_kernel_compiled_at_run_time() -> None:
    held = torch.arange(4.0).cuda()
    with pytest.raises(RuntimeError, match=r"weightsync emulator: cuModuleLoadData"):
        torch.special.bessel_j1(held)

    assert torch.equal(held.cpu(), torch.arange(4.0))


def expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    held = [torch.arange(1 << 20).cuda(index) for index in (0, 1, 1)]
    segments = torch.cuda.memory_snapshot()
    copied = held[1].to("cuda:0")

    assert {True} == {segment["is_expandable"] for segment in segments}
    assert torch.equal(copied.cpu(), torch.arange(1 << 20))
    del held, copied
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(0) == torch.cuda.memory_reserved(1) == 0
    for index in (0, 1):
        free, total = torch.cuda.mem_get_info(index)
        assert free == total


def _hold(shared: torch.Tensor, answer: torch.multiprocessing.Queue[bool]) -> None:
    answer.put(torch.equal(shared.cpu(), torch.arange(1000)))
    del shared


def tensors_of_other_processes() -> None:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    held = torch.arange(1000).cuda()
    child = context.Process(target=_hold, args=(held, answers))
    child.start()
    try:
        assert answers.get(timeout=50)
    finally:
        child.join()
    assert child.exitcode == 0


PROGRAMS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        devices,
        bytes_on_every_device,
        copies_between_devices,
        streams_and_events,
        memory_pools_and_statistics,
        out_of_memory,
        a_kernel,
        a_kernel_compiled_at_run_time,
        expandable_segments,
        tensors_of_other_processes,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        began = time.monotonic()
        PROGRAMS[name]()
        print(name, round(time.monotonic() - began, 3))
