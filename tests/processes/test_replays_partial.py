"""What is kept of partial and of cancelled pushes, as replays show it."""

from __future__ import annotations

import anyio
import pytest

import weightsync
from tests.processes.engines import slow_on_nccl
from tests.processes.in_child import in_child
from tests.processes.replays import come, empty, keeping, same, whole
from tests.processes.rig import SECONDS, on


@in_child
async def test_a_partial_push_goes_into_what_is_kept(
    device: str,
) -> None:
    async with keeping(device) as (job, sources, first):
        await first.receive(timeout=SECONDS)
        sources.fill(2)
        parts = [{"b": held["b"]} for held in sources.ranks]
        await job.push(*parts, version=2, partial=True)
        sources.fill(99)
        late = await job.join_one(empty(device))
        update = await late.receive(timeout=SECONDS)
        with late.use() as weights:
            found = {name: held.cpu() for name, held in weights.tensors.items()}

    assert 2 == update.version
    assert same(found["w"], whole(1)["w"])
    assert same(found["b"], whole(2)["b"])


@slow_on_nccl
@in_child
async def test_a_partial_push_that_is_cut_otherwise_ends_what_is_kept(
    device: str,
) -> None:
    async with keeping(device) as (job, sources, first):
        await first.receive(timeout=SECONDS)
        parts = [on(device, rank, {"w": whole(2)["w"]}) for rank in range(2)]
        await job.push(*parts, version=2, partial=True)
        await first.receive(timeout=SECONDS)
        late = await job.join_one(empty(device))
        with pytest.raises(weightsync.TimedOutError):
            await late.receive(timeout=0.3)
        await sources.push(job, 3)
        update = await late.receive(timeout=SECONDS)
        later = await job.join_one(empty(device))
        replayed = await later.receive(timeout=SECONDS)

    assert (3, 3) == (update.version, replayed.version)


@in_child
async def test_a_cancelled_push_leaves_the_version_that_was_kept_before(
    device: str,
) -> None:
    async with keeping(device) as (job, sources, first):
        with anyio.move_on_after(0.2):
            await sources.push(job, 2)  # version 1 is not received: no slot is open
        await first.aclose()
        late = await come(job, empty(device), "late")
        update = await late.receive(timeout=SECONDS)
        with late.use() as weights:
            exact = same(weights.tensors["w"], whole(1)["w"])

    assert 1 == update.version
    assert exact
