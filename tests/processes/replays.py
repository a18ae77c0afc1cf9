"""What the tests of replays push, and what they then look for on a replica."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import torch

import weightsync
from tests.processes.rig import SECONDS, Job, on, open_job, raw

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from weightsync.membership import MembershipEvent

ROWS, COLUMNS = 12, 10


def whole(version: int) -> dict[str, torch.Tensor]:
    """The model of a version: any bytes, NaNs among them."""
    chance = torch.Generator().manual_seed(version)
    data = torch.randint(0, 256, (ROWS * COLUMNS * 4,), generator=chance)
    w = data.to(torch.uint8).view(torch.float32).view(ROWS, COLUMNS)
    return {"w": w, "b": torch.full((5,), version, dtype=torch.int64)}


class Sources:
    """What two trainer ranks push: rows of ``w``, and all of ``b``."""

    def __init__(self, device: str = "cpu") -> None:
        half = ROWS // 2
        shape = (ROWS, COLUMNS)
        self.ranks: list[Mapping[str, Any]] = [
            on(
                device,
                rank,
                {
                    "w": weightsync.Shard(
                        torch.zeros(half, COLUMNS),
                        global_shape=shape,
                        offsets=(rank * half, 0),
                    ),
                    "b": torch.zeros(5, dtype=torch.int64),
                },
            )
            for rank in range(2)
        ]

    def fill(self, version: int) -> None:
        model = whole(version)
        for held, rows in zip(self.ranks, model["w"].chunk(2), strict=True):
            part = held["w"].tensor.view(torch.int32)
            part.copy_(rows.contiguous().view(torch.int32))
            held["b"].copy_(model["b"])

    async def push(self, job: Job, version: int, **options: Any) -> Any:
        """Push, and overwrite what was pushed as soon as that returns."""
        self.fill(version)
        reports = await job.push(*self.ranks, version=version, **options)
        self.fill(10_000 + version)
        return reports[0]


def columns(device: str = "cpu") -> list[Mapping[str, Any]]:
    """What two ranks of a replica receive into: columns of ``w``, and all of ``b``."""
    width = COLUMNS // 2
    return [
        on(
            device,
            3 + rank,
            {
                "w": weightsync.Shard(
                    torch.zeros(ROWS, width),
                    global_shape=(ROWS, COLUMNS),
                    offsets=(0, rank * width),
                ),
                "b": torch.zeros(5, dtype=torch.int64),
            },
        )
        for rank in range(2)
    ]


def empty(device: str) -> Mapping[str, Any]:
    """What a replica of one rank receives into."""
    return on(device, 2, whole(0))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bytes are equal, also those of NaNs."""
    return raw(found.cpu()) == raw(wanted)


def holds(rank: int, generator: weightsync.Generator, version: int) -> bool:
    """Whether a rank of the replica holds its columns of a version."""
    model = whole(version)
    with generator.use() as weights:
        columns = model["w"].chunk(2, dim=1)[rank]
        found = weights.tensors
        return same(found["w"], columns) and same(found["b"], model["b"])


@asynccontextmanager
async def keeping(
    device: str,
) -> AsyncGenerator[tuple[Job, Sources, weightsync.Generator]]:
    """Trainers that keep versions, and a replica; the first version is pushed to it."""
    async with open_job(2, device, replay=True) as job:
        sources = Sources(device)
        first = await job.join_one(empty(device))
        await sources.push(job, 1)
        yield job, sources, first


async def come(
    job: Job, state_dict: Mapping[str, Any], replica: str
) -> weightsync.Generator:
    """Join, and wait for nothing."""
    generator: weightsync.Generator = await job.enter(
        weightsync.Generator(job.address, state_dict, replica=replica, timeout=SECONDS)
    )
    return generator


async def next_event(job: Job, kind: str, number: int) -> MembershipEvent:
    """The next event of a kind after a number."""
    with anyio.fail_after(SECONDS):
        async for event in job.trainers[0].events(after=number):
            if event.kind == kind:
                return event
    raise AssertionError
