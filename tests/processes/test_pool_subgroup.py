"""Some ranks of the trainers' world push to a pool; nobody else is needed for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
import weightsync.blocking
from tests.processes.engines import slow_on_nccl
from tests.processes.meshes import World, counted
from tests.processes.rig import SECONDS

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes
    from tests.processes.meshes import Member
    from tests.processes.rig import Mode

SHAPE = (5, 3)
REPLICAS: tuple[tuple[str, int, Mode], ...] = (
    ("solo", 1, "staged"),
    ("pair", 2, "swap"),
)


def _push(member: Member, address: str, members: list[int], device: str) -> Any:
    """Push from the members, of whom each knows its place among them only."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh(device, members)  # every rank of the world takes part in this
    if member.rank not in members:
        return "outside"
    full = counted(*SHAPE).to(device)
    weight = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    rank = members.index(member.rank)
    with weightsync.blocking.Trainer(
        address, rank=rank, world_size=len(members), timeout=SECONDS
    ) as transport:
        transport.wait_for_replicas(len(REPLICAS))
        reports = [transport.push({"w": weight}, require="all") for _ in range(2)]
        member.control.hear()
    return [report.delivered for report in reports]


async def _receive(
    control: Control, address: str, place: tuple[str, int, int, Mode], device: str
) -> list[Any]:
    """Receive two versions; what has arrived of the columns of this rank."""
    name, rank, size, mode = place
    columns = slice(2 * rank, 2 if rank + 1 < size else SHAPE[1])
    tensor = torch.full((SHAPE[0], columns.stop - columns.start), -777.0)
    tensor = tensor.to(device)
    shard = weightsync.Shard(tensor, global_shape=SHAPE, offsets=(0, columns.start))
    async with weightsync.Generator(
        address,
        {"w": shard},
        replica=name,
        rank=rank,
        world_size=size,
        mode=mode,
        timeout=SECONDS,
    ) as transport:
        versions = [(await transport.receive()).version for _ in range(2)]
        control.say("done")
        await control.ahear()
    return [versions, columns.start, tensor.tolist()]


def _pushed_from(
    processes: Processes, address: str, members: list[int]
) -> tuple[list[Any], list[Any]]:
    """Push from some of four ranks; return their reports and what arrived."""
    device = processes.device
    world = World(processes, 4, _push, address, members, device)
    outside = [world.ranks[rank].result() for rank in range(4) if rank not in members]
    ranks = [
        processes.start(_receive, address, (name, rank, size, mode), device)
        for name, size, mode in REPLICAS
        for rank in range(size)
    ]
    for rank in ranks:
        assert "done" == rank.hear()
    for child in (*ranks, *[world.ranks[rank] for rank in members]):
        child.say("end")
    reports = [world.ranks[rank].result() for rank in members]

    assert ["outside"] * 2 == outside
    return reports, [rank.result() for rank in ranks]


@slow_on_nccl
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("members", [[0, 1], [1, 3], [3, 1]], ids=str)
def test_what_some_ranks_push_is_whole_on_every_replica_whoever_they_are(
    processes: Processes, address: str, members: list[int]
) -> None:
    reports, arrived = _pushed_from(processes, address, members)
    full = counted(*SHAPE)

    names = {name for name, _, _ in REPLICAS}
    assert all(names == set(delivered) for each in reports for delivered in each)
    assert reports[0] == reports[1]
    assert [[1, 2]] * 3 == [versions for versions, _, _ in arrived]
    assert [
        full[:, start : start + len(tensor[0])].tolist() for _, start, tensor in arrived
    ] == [tensor for _, _, tensor in arrived]
    assert [0, 0, 2] == [start for _, start, _ in arrived]
    assert [3, 2, 1] == [len(tensor[0]) for _, _, tensor in arrived]
