"""Groups of any sizes that start in any order, and groups inside of a larger world."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
import weightsync.blocking
from tests.processes.harness import free_address
from tests.processes.meshes import (
    Team,
    World,
    counted,
    delivered,
    device_type,
    filled,
    generator,
    halves,
    local_of,
    sharded,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.processes.harness import Processes
    from tests.processes.meshes import Member, Rank

pytestmark = pytest.mark.anyio

MEETING_SECONDS = 15.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _meet(
    member: Member,
    addresses: Sequence[str],
    delays: Sequence[Sequence[float]],
    count: int,
) -> None:
    weight = sharded(counted(7, 5), member.mesh(member.world), 0)
    for address, delay in zip(addresses, delays, strict=True):
        time.sleep(delay[member.rank])
        with weightsync.blocking.Trainer(address, timeout=MEETING_SECONDS) as transport:
            transport.wait_for_replicas(count)
            transport.push({"w": weight})


async def _received(address: str, number: int, delay: float) -> list[Any]:
    weight = filled(7, 5)
    await anyio.sleep(delay)
    async with generator(address, [{"w": weight}], number, 0) as transport:
        await transport.receive(timeout=MEETING_SECONDS)
    return weight.tolist()


async def meetings(
    processes: Processes,
    sizes: tuple[int, int],
    trainers: Sequence[Sequence[float]],
    generators: Sequence[Sequence[float]],
) -> list[list[Any]]:
    """Set up, push and close as often as there are delays; what each replica got."""
    addresses = [free_address() for _ in trainers]
    world = World(processes, sizes[0], _meet, addresses, trainers, sizes[1])
    found: list[list[Any]] = []

    async def receive(address: str, number: int, delay: float) -> None:
        found.append(await _received(address, number, delay))

    for address, delays in zip(addresses, generators, strict=True):
        with anyio.fail_after(MEETING_SECONDS):
            async with anyio.create_task_group() as group:
                for number, delay in enumerate(delays):
                    group.start_soon(receive, address, number, delay)
    world.results()
    return found


SIZES = [(3, 1), (1, 3), (3, 2), (2, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_groups_of_any_sizes_meet_in_any_order(
    processes: Processes, sizes: tuple[int, int]
) -> None:
    forward = [[0.2 * rank for rank in range(size)] for size in sizes]
    crossed = [forward[0], forward[1][::-1]]
    late = [[0.5] * sizes[0], forward[1]]
    trainers, generators = zip(forward, crossed, late, strict=True)
    found = await meetings(processes, sizes, trainers, generators)

    assert [counted(7, 5).tolist()] * (3 * sizes[1]) == found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_twenty_set_ups_with_random_delays_all_meet(
    processes: Processes, sizes: tuple[int, int]
) -> None:
    chance = random.Random(27)
    limits = [2.0, 2.0] + [0.5] * 18
    trainers, generators = (
        [[chance.uniform(0, limit) for _ in range(size)] for limit in limits]
        for size in sizes
    )
    found = await meetings(processes, sizes, trainers, generators)

    assert [counted(7, 5).tolist()] * (20 * sizes[1]) == found


def _from_members(member: Member, address: str, members: list[int]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    # Every rank of the world takes part in this.
    mesh = DeviceMesh(device_type(), members)
    if member.rank not in members:
        return "outside"
    member.control.hear()
    weight = distribute_tensor(counted(5, 3), mesh, [Shard(0)], src_data_rank=None)
    with weightsync.blocking.Trainer(
        address, rank=members.index(member.rank), world_size=2, timeout=15
    ) as transport:
        transport.wait_for_replicas(1)
        report = transport.push({"w": weight})
    return report.nbytes, local_of(weight).tolist()


@pytest.mark.parametrize("members", [[0, 1], [1, 3], [3, 1]], ids=str)
async def test_a_part_of_the_trainers_world_pushes_alone(
    processes: Processes, address: str, members: list[int]
) -> None:
    whole = filled(5, 3)
    world = World(processes, 4, _from_members, address, members)
    outside = [world.ranks[rank].result() for rank in range(4) if rank not in members]
    for rank in members:
        world.ranks[rank].say("go")
    async with generator(address, [{"w": whole}], 0, 0) as transport:
        update = await transport.receive(timeout=15)
    reports = [world.ranks[rank].result() for rank in members]

    full = counted(5, 3).tolist()
    assert ["outside"] * 2 == outside
    assert full == whole.tolist()
    assert [(60, full[:3]), (60, full[3:])] == reports
    assert (1, 60) == (update.version, update.nbytes)


def _on_a_mesh_of_some(rank: Rank) -> int:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh(device_type(), [1, 3])
    weight = distribute_tensor(counted(5, 3), mesh, [Shard(0)])
    state_dict = {"w": weight, f"own.{rank.rank}": counted(2) + rank.rank}
    rank.transport.wait_for_replicas(1)
    return rank.transport.push(state_dict).nbytes


async def test_what_lies_on_a_mesh_of_some_ranks_comes_from_these(
    processes: Processes, address: str
) -> None:
    whole = {"w": filled(5, 3)} | {f"own.{rank}": filled(2) for rank in range(4)}
    team = Team(processes, address, 4, _on_a_mesh_of_some)
    await delivered(team, [whole])

    assert [60 + 4 * 8] * 4 == team.results()
    assert counted(5, 3).tolist() == whole["w"].tolist()
    assert [[rank, rank + 1] for rank in range(4)] == [
        whole[f"own.{rank}"].tolist() for rank in range(4)
    ]


PUSHES = 12
ALL_MEET = PUSHES - 3  # The first push that waits for every replica.
LARGE = (1024, 2048)


def _expected(version: int) -> int:
    if version < ALL_MEET:
        return 1
    return 3 if version < PUSHES else 2  # One leaves after the last push but one.


def _many_pushes(rank: Rank) -> list[weightsync.PushReport]:
    weight = sharded(counted(*LARGE) % 1000, rank.mesh(2), 0)
    reports = []
    for version in range(1, PUSHES + 1):
        rank.transport.wait_for_replicas(_expected(version))
        if rank.rank == version % 2:
            time.sleep(0.03)
        reports.append(rank.transport.push({"w": weight}, version=version))
        local_of(weight).add_(1)
    return reports


async def _follow(
    transport: weightsync.Generator,
    weight: torch.Tensor,
    part: torch.Tensor,
    until: int,
) -> list[int]:
    """Receive until the trainers close; the versions, negative where bytes differ."""
    versions = []
    async for update in transport:
        exact = torch.equal(weight, part + update.version - 1)
        versions.append(update.version if exact else -update.version)
        if update.version >= until:
            break
    return versions


async def test_every_push_has_one_set_of_members_while_replicas_come_and_go(
    processes: Processes, address: str
) -> None:
    full = counted(*LARGE) % 1000
    team = Team(processes, address, 2, _many_pushes)
    found: dict[str, list[list[int]]] = {}

    begun = anyio.Event()

    async def take_part(number: int, dim: int, ranks: int, until: int = PUSHES) -> None:
        shards = halves(full, dim, ranks)
        layout = [{"w": shard} for shard in shards]
        found[f"gen-{number}"] = [[] for _ in shards]

        async def follow(rank: int, part: torch.Tensor) -> None:
            async with generator(address, layout, number, rank) as transport:
                begun.set()
                versions = await _follow(transport, shards[rank].tensor, part, until)
                found[f"gen-{number}"][rank] = versions

        async with anyio.create_task_group() as group:
            for rank, part in enumerate(full.chunk(ranks, dim)):
                group.start_soon(follow, rank, part)

    async with anyio.create_task_group() as group:
        group.start_soon(take_part, 0, 0, 1, PUSHES - 1)
        await begun.wait()
        await anyio.sleep(0.05)
        group.start_soon(take_part, 1, 0, 2)
        await anyio.sleep(0.1)
        group.start_soon(take_part, 2, 1, 2)
    first, second = team.results()

    delivered_to = {
        name: [report.version for report in first if name in report.delivered]
        for name in found
    }
    assert first == second
    assert list(range(1, PUSHES)) == delivered_to["gen-0"][: PUSHES - 1]
    for name, ranks in found.items():
        last = PUSHES - 1 if name == "gen-0" else PUSHES
        assert [[v for v in delivered_to[name] if v <= last]] * len(ranks) == ranks
        start = delivered_to[name][0]
        assert list(range(start, last + 1)) == ranks[0]
