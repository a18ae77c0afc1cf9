"""A push on a GPU that begins before any replica has said which engine there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.lowlevel
import pytest
import torch

from tests.processes.engines import EMULATED_NCCL
from tests.processes.rig import SECONDS, on, open_job, together
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.harness import Control

pytestmark = testing.requires_emulator()

NBYTES = 8 << 20
COPIES = 1500
"""Of so many bytes on one GPU: they take longer than a replica needs to join."""


def filled(number: int, value: int) -> torch.Tensor:
    """Bytes of one value on a GPU."""
    state = {"w": torch.full((NBYTES,), value, dtype=torch.uint8)}
    found: torch.Tensor = on("cuda", number, state)["w"]
    return found


def written_late() -> tuple[torch.Tensor, torch.cuda.Stream]:
    """A tensor into which a stream writes for long, in the end sevens."""
    source = filled(0, 0)
    steps = [filled(0, value) for value in (1, 2, 7)]
    stream = torch.cuda.Stream(0)  # type: ignore[no-untyped-call] # of torch
    with torch.cuda.stream(stream):
        for step in range(COPIES):
            source.copy_(steps[step % 2], non_blocking=True)
        source.copy_(steps[2], non_blocking=True)
    return source, stream


async def _pushed(control: Control) -> list[int]:
    held, other = filled(2, 0), filled(1, 7)
    async with open_job(2, "cuda", replay=True) as job:

        async def first() -> None:
            torch.cuda.set_device(0)
            source, stream = written_late()
            with torch.cuda.stream(stream):
                await job.trainers[0].push({"w": source}, timeout=SECONDS)

        async def then() -> None:
            await anyio.lowlevel.checkpoint()
            generator = await job.join_one({"w": held})
            await job.trainers[1].push({"w": other}, timeout=SECONDS)
            await generator.receive(timeout=SECONDS)

        await together(first, then)
    return sorted(set(held.cpu().tolist()))


@pytest.mark.slow
def test_it_waits_for_what_the_callers_stream_was_given_before() -> None:
    processes = EMULATED_NCCL.processes()
    try:
        found = processes.start(_pushed).result()
    finally:
        processes.end()

    assert [7] == found
