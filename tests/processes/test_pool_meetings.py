"""Pools of any sizes are set up and closed again and again, in any order."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import pytest
import torch

import weightsync
from tests.processes.harness import free_address

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

SECONDS = 15.0
SHAPE = (7, 5)

Rounds = list[tuple[str, float]]
"""Where a process opens its transport, one time after the other, and after how long."""


def _rows(rank: int, world_size: int, device: str) -> weightsync.Shard:
    """The rows of a trainer rank, in parts as equal as can be."""
    whole = torch.arange(35, dtype=torch.int32).reshape(SHAPE)
    start, end = (SHAPE[0] * part // world_size for part in (rank, rank + 1))
    part = whole[start:end].contiguous().to(device)
    return weightsync.Shard(part, global_shape=SHAPE, offsets=(start, 0))


async def _push(
    control: Control, place: tuple[int, int], replicas: int, rounds: Rounds, device: str
) -> list[float]:
    """Set up, push and close; the seconds of each time, without the delay.

    Rank 0 asks for the membership, and no other rank follows it in that.
    """
    rank, world_size = place
    state = {"w": _rows(rank, world_size, device)}
    seconds = []
    for address, delay in rounds:
        await anyio.sleep(delay)
        started = time.monotonic()
        async with weightsync.Trainer(
            address, rank=rank, world_size=world_size, timeout=SECONDS
        ) as transport:
            await transport.wait_for_replicas(replicas, timeout=SECONDS)
            if rank == 0:
                assert replicas == len((await transport.membership()).replicas)
            report = await transport.push(state, require="all", timeout=SECONDS)
            assert replicas == len(report.delivered)
        seconds.append(time.monotonic() - started)
    return seconds


async def _receive(
    control: Control, name: str, rank: int, rounds: Rounds, device: str
) -> list[list[Any]]:
    """Set up, receive into what holds a sentinel, and close; what was there each time.

    A replica has two ranks, of which one has four columns and the other one.
    """
    columns = ((0, 4), (4, 5))[rank]
    found = []
    for address, delay in rounds:
        await anyio.sleep(delay)
        shape = (SHAPE[0], columns[1] - columns[0])
        tensor = torch.full(shape, -777, dtype=torch.int32).to(device)
        shard = weightsync.Shard(tensor, global_shape=SHAPE, offsets=(0, columns[0]))
        async with weightsync.Generator(
            address,
            {"w": shard},
            replica=name,
            rank=rank,
            world_size=2,
            timeout=SECONDS,
        ) as transport:
            await transport.receive(timeout=SECONDS)
            found.append(tensor.cpu().tolist())
    return found


class Meetings(NamedTuple):
    """How many trainer ranks and replicas meet, how often, and in which order.

    In order "forward" one comes after the other, at random distances; "crossed" lets
    the last trainer rank and the last rank of the last replica be there first.
    """

    trainers: int
    replicas: int
    order: str
    times: int
    limit: float
    """Nobody is later than that, in seconds."""

    def rounds(self) -> list[Rounds]:
        """When and where each process begins: trainers, and then generators."""
        chance = random.Random(27)
        addresses = [free_address() for _ in range(self.times)]
        delays = [
            self._delays(self.trainers, chance)
            + self._delays(2 * self.replicas, chance)
            for _ in addresses
        ]
        return [
            list(zip(addresses, each, strict=True))
            for each in zip(*delays, strict=True)
        ]

    def _delays(self, count: int, chance: random.Random) -> list[float]:
        delays = [chance.uniform(0, self.limit) for _ in range(count)]
        return sorted(delays, reverse=self.order == "crossed")


SIZES = [(3, 1), (1, 3), (3, 2), (2, 2)]
FEW = Meetings(3, 2, "crossed", 1, 0.3)
MANY = [
    Meetings(*sizes, order, 20, 2.0)
    for sizes in SIZES
    for order in ("forward", "crossed")
]


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "meetings",
    [FEW, *[pytest.param(each, marks=pytest.mark.slow) for each in MANY]],
    ids=lambda meetings: "{}x{}-{}-{}".format(*meetings),
)
def test_pools_of_any_sizes_meet_in_any_order_again_and_again(
    meetings: Meetings, processes: Processes
) -> None:
    count, replicas = meetings.trainers, meetings.replicas
    rounds, device = meetings.rounds(), processes.device
    trainers = [
        processes.start(_push, (rank, count), replicas, rounds[rank], device)
        for rank in range(count)
    ]
    generators = [
        processes.start(_receive, f"G{number // 2}", number % 2, each, device)
        for number, each in enumerate(rounds[count:])
    ]
    seconds = [trainer.result(160) for trainer in trainers]
    found = [generator.result(30) for generator in generators]
    whole = torch.arange(35).reshape(SHAPE)

    assert all(each < SECONDS for rank in seconds for each in rank)
    wanted = [whole[:, :4].tolist(), whole[:, 4:].tolist()]
    assert [
        [wanted[number % 2]] * meetings.times for number in range(len(found))
    ] == found
