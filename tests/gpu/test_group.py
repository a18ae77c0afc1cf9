"""What the emulator cannot show of a process group: kernels, and capture in graphs.

One process, its GPU, and a group of one rank: any machine with a GPU can run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from weightsync.backend import NCCL

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

REPLAYS = 3


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Open the default group on the first GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    place = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(NCCL, device_id=device, **place)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_captured_all_reduce_runs_in_every_replay(
    device: torch.device, async_op: bool
) -> None:
    numbers = torch.zeros(8, device=device)
    dist.all_reduce(numbers)  # NCCL sets itself up outside of the capture.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        work = dist.all_reduce(numbers, async_op=async_op)
        if work is not None:
            work.wait()
        numbers.mul_(2)
    for _ in range(REPLAYS):
        graph.replay()

    assert [14.0] * 8 == numbers.tolist()


def test_work_that_was_waited_for_comes_before_later_kernels(
    device: torch.device,
) -> None:
    numbers = torch.zeros(1 << 20, dtype=torch.int64, device=device)
    for _ in range(100):
        numbers.add_(1)
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None
        work.wait()
    lowest, highest = numbers.min().item(), numbers.max().item()

    assert (100, 100) == (lowest, highest)


def test_objects_are_gathered(device: torch.device) -> None:
    del device
    found: list[Any] = [None]
    dist.all_gather_object(found, {"step": 7})

    assert [{"step": 7}] == found


def test_a_put_to_oneself_is_there_when_its_signal_was_taken(
    device: torch.device,
) -> None:
    backend: Any = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        source, target = (torch.empty(1 << 16, device=device) for _ in "ab")
    window: Any = dist._new_window(target)
    numbers = torch.arange(1 << 16, dtype=source.dtype)
    source.copy_(numbers)
    window.put(source, 0, 0, False)
    window.wait_signal(0, False)
    found = target.cpu()
    window.tensor_deregister()

    assert torch.equal(numbers, found)
