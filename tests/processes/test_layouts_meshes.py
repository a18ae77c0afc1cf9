"""Trainer ranks cut the model over one and two dims of a mesh; replicas do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.processes.meshes import (
    Team,
    as_lists,
    counted,
    delivered,
    filled,
    fsdp,
    halves,
    joined,
    local_of,
    sharded,
)

if TYPE_CHECKING:
    from tests.processes.harness import Processes
    from tests.processes.meshes import Rank

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TwoLayers(nn.Module):
    """Layers whose parameters hold the numbers from 0 on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(1, width)
        self.down = nn.Linear(width, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(counted(*parameter.shape))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(hidden))
        return found


def entries(width: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in TwoLayers(width).named_parameters()}


def destinations(width: int) -> dict[str, torch.Tensor]:
    return {name: filled(*full.shape) for name, full in entries(width).items()}


def row_halves(width: int) -> list[dict[str, Any]]:
    cut = {name: halves(full) for name, full in entries(width).items()}
    return [{name: pieces[rank] for name, pieces in cut.items()} for rank in range(2)]


def put_together(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {
        name: torch.cat([rank[name].tensor for rank in ranks]).tolist()
        for name in ranks[0]
    }


def _parallel(rank: Rank, width: int) -> nn.Module:
    """Cut by columns and rows over dim "tp" of a mesh, then by FSDP over the others."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    names = ("replicate", "shard", "tp")
    mesh = rank.mesh(rank.world // 4, 2, 2, names=names)
    model = TwoLayers(width)
    parallelize_module(
        model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    return fsdp(model, mesh["shard"] if rank.world == 4 else mesh["replicate", "shard"])


def _parallel_then_fsdp(rank: Rank, width: int) -> tuple[list[Any], list[Any], int]:
    state_dict = _parallel(rank, width).state_dict()
    report = rank.push(state_dict, replicas=2, check_replicas=True)
    held = [local_of(state_dict[f"{name}.weight"]).tolist() for name in ("up", "down")]
    return [row for (row,) in held[0]], held[1], report.nbytes


ROWS = {8: [[0, 1], [4, 5], [2, 3], [6, 7]], 5: [[0, 1], [3], [2], [4]]}


@pytest.mark.parametrize(("width", "copies"), [(8, 1), (5, 1), (5, 2)])
async def test_fsdp_over_tensor_parallel_arrives_in_the_order_of_rows(
    processes: Processes, address: str, width: int, copies: int
) -> None:
    whole, pieces = destinations(width), row_halves(width)
    team = Team(processes, address, 4 * copies, _parallel_then_fsdp, width)
    await delivered(team, [whole], pieces)
    up, down, nbytes = zip(*team.results(), strict=True)

    expected = as_lists(entries(width))
    assert expected == as_lists(whole) == put_together(pieces)
    assert ROWS[width] * copies == list(up)
    assert [2, 2, 1, 1] * copies == [len(rows) for rows in down]
    assert {2 * sum(t.nbytes for t in whole.values())} == set(nbytes)


def _tensor_parallel(rank: Rank, width: int) -> list[int | None]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = TwoLayers(width)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, rank.mesh(rank.world), plan)
    rank.push(model.state_dict())
    placements = [parameter.placements[0] for parameter in model.parameters()]
    return [getattr(placement, "dim", None) for placement in placements]


async def test_tensor_parallel_trainers_fill_whole_tensors(
    processes: Processes, address: str
) -> None:
    whole = destinations(5)
    team = Team(processes, address, 3, _tensor_parallel, 5)
    await delivered(team, [whole])
    found = team.results()

    assert as_lists(entries(5)) == as_lists(whole)
    assert [[0, 0, 1, None]] * 3 == found


def _hybrid(rank: Rank, width: int) -> tuple[list[Any], list[int]]:
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    state_dict = fsdp(TwoLayers(width), mesh).state_dict()
    reports = [rank.push(state_dict, check_replicas=check) for check in (False, True)]
    held = local_of(state_dict["up.weight"]).flatten().tolist()
    return held, [report.nbytes for report in reports]


async def test_replicated_fsdp_sends_every_byte_once(
    processes: Processes, address: str
) -> None:
    whole = destinations(5)
    team = Team(processes, address, 4, _hybrid, 5)
    async with joined(team, [whole]) as replicas:
        first = await replicas.receive()
        found = as_lists(whole)
        for tensor in whole.values():
            tensor.fill_(-777)
        second = await replicas.receive()
    results = team.results()

    nbytes = sum(tensor.nbytes for tensor in whole.values())
    assert as_lists(entries(5)) == found == as_lists(whole)
    assert [[0, 1, 2], [3, 4]] * 2 == [held for held, _ in results]
    assert [[nbytes, nbytes]] * 4 == [counts for _, counts in results]
    assert [nbytes] * 2 == [first[0].nbytes, second[0].nbytes]


def _column_slice(rank: Rank) -> tuple[bool, tuple[int, ...]]:
    from torch.distributed.tensor import DTensor, Shard

    full = counted(3, 4)
    local = full[:, 2 * rank.rank : 2 * rank.rank + 2]
    weight = DTensor.from_local(local, rank.mesh(2), [Shard(1)])
    rank.push({"w": weight})
    held = weight.to_local()
    return held.is_contiguous(), held.stride()


async def test_dtensors_over_slices_of_a_larger_tensor_arrive_exactly(
    processes: Processes, address: str
) -> None:
    whole = filled(3, 4)
    team = Team(processes, address, 2, _column_slice)
    await delivered(team, [{"w": whole}])

    assert [(False, (4, 1))] * 2 == team.results()
    assert counted(3, 4).tolist() == whole.tolist()


def _copies_that_differ(rank: Rank) -> tuple[list[Any], list[int], str]:
    weight = sharded(counted(4, 1), rank.mesh(2, 2), None, 0)
    held = weight.to_local().flatten().tolist()
    reports = [rank.push({"w": weight}, check_replicas=True)]
    if rank.rank >= 2:
        weight.to_local().add_(1000)
    reports.append(rank.push({"w": weight}))
    refused = rank.refusal({"w": weight}, check_replicas=True)
    return held, [report.nbytes for report in reports], refused


async def test_a_replicated_shard_is_sent_once_and_from_one_copy(
    processes: Processes, address: str
) -> None:
    whole = filled(4, 1)
    found = []
    team = Team(processes, address, 4, _copies_that_differ)
    async with joined(team, [{"w": whole}]) as replicas:
        for _ in range(2):
            await replicas.receive()
            found.append(whole.flatten().tolist())
        held, nbytes, refused = zip(*team.results(), strict=True)
        version = next(iter(replicas)).version

    assert [[0, 1], [2, 3]] * 2 == list(held)
    assert [0, 1, 2, 3] == found[0]
    assert found[1] in ([0, 1, 2, 3], [1000, 1001, 1002, 1003])
    assert [[16, 16]] * 4 == list(nbytes)
    assert 2 == version
    assert 1 == len(set(refused))
    assert refused[0].startswith("PlanError: ")
    assert "'w'" in refused[0]
    assert all(f"trainer rank {rank}" in refused[0] for rank in (0, 2))


def _three_dims(rank: Rank) -> tuple[int, ...]:
    mesh = rank.mesh(2, 2, 2)
    weight = sharded(counted(7, 6, 2), mesh, 0, 1, 0)
    rank.push({"w": weight, "b": sharded(counted(3), mesh, None, 0, None)})
    return tuple(weight.to_local().shape)


async def test_a_mesh_of_three_dims_may_cut_one_dim_twice(
    processes: Processes, address: str
) -> None:
    whole = {"w": filled(7, 6, 2), "b": filled(3)}
    team = Team(processes, address, 8, _three_dims)
    await delivered(team, [whole])

    assert 7 * 6 * 2 == sum(torch.Size(shape).numel() for shape in team.results())
    assert counted(7, 6, 2).tolist() == whole["w"].tolist()
    assert [0, 1, 2] == whole["b"].tolist()
