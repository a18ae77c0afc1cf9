"""What a push over NCCL calls of CUDA and NCCL: no kernel, and nothing anew."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.driven import MIB
from tests.processes.rig import MODES, Job, Mode, on, open_job
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Control

pytestmark = [testing.requires_emulator(), pytest.mark.emulated]

PUSHES = 20
KERNELS = ("Launch", "a launch")
NEW = ("MemAlloc", "Malloc", "HostAlloc", "StreamCreate", "Register", "CommInit")
"""Parts of the names of what makes something: memory, streams, windows, groups."""

EVENTS = 8
"""So many more may be in use at once in one push than in another."""


def counted(parts: tuple[str, ...]) -> Counter[str]:
    """Calls until now of functions whose names have one of these parts."""
    found = testing.calls()
    found.pop("cudaLaunchHostFunc", None)  # which runs on the host
    return Counter(
        {name: found[name] for name in found if any(part in name for part in parts)}
    )


def allocations() -> int:
    """How often torch's own allocator was asked, for the GPUs of this process."""
    return sum(
        int(torch.cuda.memory_stats(gpu)["allocation.all.allocated"])
        for gpu in range(torch.cuda.device_count())
    )


def events() -> int:
    """How many events there are in this process."""
    found = testing.calls()
    made = found["cudaEventCreateWithFlags"] + found.get("cudaEventCreate", 0)
    return made - found.get("cudaEventDestroy", 0)


def _shard(whole: torch.Tensor, top: int, left: int) -> weightsync.Shard:
    """Half of a matrix, from this row or column on."""
    rows, columns = whole.shape
    height, width = (rows // 2, columns) if left < 0 else (rows, columns // 2)
    part = whole[max(top, 0) :, max(left, 0) :][:height, :width].contiguous()
    return weightsync.Shard(
        part, global_shape=(rows, columns), offsets=(max(top, 0), max(left, 0))
    )


async def _push_often(control: Control, mode: Mode) -> list[Any]:
    """Push rows of two trainer ranks to columns of two generator ranks."""
    whole = torch.arange(64 * 48, dtype=torch.int32).reshape(64, 48)
    rows = [_shard(whole, top, -1) for top in (0, 32)]
    columns = [_shard(torch.zeros_like(whole), -1, left) for left in (0, 24)]
    sources = [on("cuda", rank, {"m": shard}) for rank, shard in enumerate(rows)]
    held = [on("cuda", 2 + rank, {"m": shard}) for rank, shard in enumerate(columns)]
    before = counted(KERNELS)
    found: list[tuple[Counter[str], int]] = []
    there: list[int] = []
    async with open_job(2, "cuda") as job:
        generators = await job.join(*held, mode=mode)
        for _ in range(PUSHES):
            await job.deliver(generators, *sources)
            found.append((counted(NEW), allocations()))
            there.append(events())
        values = [shards["m"].tensor.cpu() for shards in held]
    exact = torch.equal(whole, torch.cat(values, dim=1))
    windows = testing.calls()["ncclCommWindowRegister"]
    launched = counted(KERNELS) - before
    more = [_since(found[0], each) for each in found]
    return [exact, dict(launched), windows, more, there[-1] - there[1]]


def _since(first: tuple[Counter[str], int], now: tuple[Counter[str], int]) -> Any:
    return dict(now[0] - first[0]), max(now[1] - first[1], 0)


@pytest.mark.parametrize("mode", MODES)
def test_pushes_launch_no_kernel_and_make_nothing_after_the_first(
    mode: Mode, processes: EmulatedProcesses
) -> None:
    found = processes.start(_push_often, mode).result(60)
    exact, launched, windows, more, more_events = found

    assert exact
    assert {} == launched
    assert 4 == windows  # one of each rank of the link
    assert [({}, 0)] * PUSHES == more
    assert more_events <= EVENTS


def _blocked() -> int:
    """How many threads make a call that may block."""
    return sum(each.name == "weightsync-blocking" for each in threading.enumerate())


async def _nobody_blocked(job: Job) -> bool:
    """Push what never completes; return whether all threads end in the meantime."""
    source = on("cuda", 0, {"w": torch.zeros(20 * MIB, dtype=torch.uint8)})
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: job.outcomes(source, timeout=4.0))
        while testing.calls().get("ncclPutSignal", 0) < 2:
            await anyio.sleep(0.01)
        with anyio.move_on_after(2.0) as scope:
            while _blocked():
                await anyio.sleep(0.01)
    return not scope.cancelled_caught


async def _never_completes(control: Control) -> bool:
    weights = on("cuda", 1, {"w": torch.zeros(20 * MIB, dtype=torch.uint8)})
    async with open_job(1, "cuda") as job:
        await job.join_one(weights)
        return await _nobody_blocked(job)


def test_no_thread_waits_for_a_put_that_is_under_way(
    processes: EmulatedProcesses,
) -> None:
    processes.faults = "put@n=2:stall"
    found = processes.start(_never_completes).result(60)

    assert found
