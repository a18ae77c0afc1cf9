"""The memory of what trainer ranks keep: one copy, and none when they have closed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.processes.driven import census_at_rest
from tests.processes.engines import slow_on_nccl
from tests.processes.in_child import in_child
from tests.processes.rig import SECONDS, Job, on, open_job

ROWS = 16
ROW_BYTES = 9 * 4096 * 7
"""Whole pages, and no multiple of it is the size of anything else that is mapped."""

Cut = tuple[int, int]
"""How many rows each of two trainer ranks has."""


def kept_rows() -> list[int]:
    """How many rows each copy has that this process has mapped: found by their size."""
    gc.collect()
    sizes = [
        _size(line.split()[0])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:weightsync " in line
    ]
    return sorted([n // ROW_BYTES for n in sizes if n in _SIZES])


_SIZES = {rows * ROW_BYTES for rows in range(1, ROWS)}


def _size(span: str) -> int:
    start, end = span.split("-")
    return int(end, 16) - int(start, 16)


def kept(job: Job) -> list[torch.Tensor]:
    """What the trainer ranks keep."""
    found: list[torch.Tensor] = []
    for trainer in job.trainers:
        session: Any = trainer._core.session
        found += session.rank._keeper._copy.captured.tensors
    return found


async def push(job: Job, device: str, cut: Cut, *, timeout: float = SECONDS) -> None:
    """Push rows cut so."""
    parts = []
    for rank, offset in enumerate((0, cut[0])):
        shard = weightsync.Shard(
            torch.full((cut[rank], ROW_BYTES), rank + 1, dtype=torch.uint8),
            global_shape=(ROWS, ROW_BYTES),
            offsets=(offset, 0),
        )
        parts.append(on(device, rank, {"w": shard}))
    await job.push(*parts, timeout=timeout)


@in_child
async def test_one_copy_is_kept_whatever_is_pushed_and_none_when_all_is_closed(
    device: str,
) -> None:
    cuts = [(8, 8), (8, 8), (4, 12), (13, 3), (8, 8)]
    empty = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8)
    found = []
    async with open_job(2, device, replay=True) as job:
        generator = await job.join_one(on(device, 2, {"w": empty}))
        joined = kept_rows()
        for cut in cuts:
            await push(job, device, cut)
            found.append(kept_rows())
            await generator.receive(timeout=SECONDS)
        tensors = kept(job)
        pinned = [tensor.is_pinned() for tensor in tensors]
    unpinned = [tensor.is_pinned() for tensor in tensors]
    del tensors
    closed = kept_rows()

    assert [] == joined
    assert [sorted(cut) for cut in cuts] == found, found
    assert [device == "cuda"] * 2 == pinned
    assert [False] * 2 == unpinned
    assert [] == closed, closed


@slow_on_nccl
@in_child
async def test_the_copy_before_lasts_until_the_push_of_a_new_layout_has_succeeded(
    device: str,
) -> None:
    empty = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8)
    async with open_job(2, device, replay=True) as job:
        generator = await job.join_one(on(device, 2, {"w": empty}))
        await push(job, device, (8, 8))
        # The version before is not received, so no slot is open.
        with pytest.raises(weightsync.TimedOutError, match="opened no slot"):
            await push(job, device, (4, 12), timeout=0.3)
        both = kept_rows()
        await generator.receive(timeout=SECONDS)
        await push(job, device, (13, 3))
        one = kept_rows()

    assert [4, 8, 8, 12] == both, both
    assert [3, 13] == one, one


@slow_on_nccl
@in_child
async def test_jobs_that_keep_versions_and_end_leave_nothing(device: str) -> None:
    async def once() -> None:
        empty = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8)
        async with open_job(2, device, replay=True) as job:
            generator = await job.join_one(on(device, 2, {"w": empty}))
            for cut in ((8, 8), (4, 12), (8, 8)):
                await push(job, device, cut)
                await generator.receive(timeout=SECONDS)

    await once()
    before = census_at_rest(0, 1, 2)
    for _ in range(3):
        await once()
    after = census_at_rest(0, 1, 2)

    assert before.descriptors == after.descriptors, (before, after)
    if device == "cpu":  # each stream of an emulated GPU is a thread
        assert before.threads == after.threads, (before, after)
