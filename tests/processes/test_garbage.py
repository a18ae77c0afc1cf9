"""What pushes leave: nothing that only the garbage collector frees."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from tests.processes.in_child import in_child
from tests.processes.rig import on, open_job

if TYPE_CHECKING:
    from collections.abc import Iterator

PUSHES = 3


def _garbage() -> Iterator[str]:
    """Name what is ours, or of a device, in cycles of references now."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    for found in gc.garbage:
        kind = type(found)
        of_torch = issubclass(kind, (torch.Tensor, torch.cuda.Event))
        if of_torch or kind.__module__.startswith("weightsync"):
            yield kind.__name__
    gc.garbage.clear()


@in_child
async def test_pushes_and_receives_leave_no_cycles_of_references(device: str) -> None:
    weights = torch.arange(1 << 16, dtype=torch.int32)
    async with open_job(2, device) as job:
        generator = await job.join_one(on(device, 2, {"w": torch.zeros_like(weights)}))
        sources = [on(device, rank, {"w": weights}) for rank in (0, 1)]
        await job.deliver([generator], *sources)
        gc.collect()
        gc.disable()
        for _ in range(PUSHES):
            await job.deliver([generator], *sources)
        found = list(_garbage())

    assert [] == found, found
