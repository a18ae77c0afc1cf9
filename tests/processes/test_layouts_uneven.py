"""Shards of unequal sizes and of none, to replicas of several layouts at once."""

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
from weightsync import Shard

if TYPE_CHECKING:
    from tests.processes.harness import Processes
    from tests.processes.meshes import Rank

pytestmark = pytest.mark.anyio

UNEVEN = {"five": ((5, 2), 0), "seven": ((7, 5), 0), "columns": ((3, 5), 1)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _uneven(rank: Rank) -> list[int]:
    mesh = rank.mesh(rank.world)
    state_dict = {
        name: sharded(counted(*shape), mesh, dim)
        for name, (shape, dim) in UNEVEN.items()
    }
    rank.push(state_dict, replicas=2)
    return [state_dict[name].to_local().shape[dim] for name, (_, dim) in UNEVEN.items()]


SIZES = {
    2: [(3, 4, 3), (2, 3, 2)],
    3: [(2, 3, 2), (2, 3, 2), (1, 1, 1)],
    4: [(2, 2, 2), (2, 2, 2), (1, 2, 1), (0, 1, 0)],
}


@pytest.mark.parametrize("trainers", [2, 3, 4])
async def test_uneven_shards_fill_uneven_rows_and_columns(
    processes: Processes, address: str, trainers: int
) -> None:
    full = {name: counted(*shape) for name, (shape, _) in UNEVEN.items()}
    cuts = [
        {name: halves(tensor, dim) for name, tensor in full.items()} for dim in (0, 1)
    ]
    team = Team(processes, address, trainers, _uneven)
    await delivered(
        team,
        *[
            [{name: pieces[rank] for name, pieces in cut.items()} for rank in range(2)]
            for cut in cuts
        ],
    )
    sizes = [tuple(held) for held in team.results()]

    assert SIZES[trainers] == sizes
    assert [(4, 5), (3, 5)] == [piece.tensor.shape for piece in cuts[0]["seven"]]
    for dim, cut in enumerate(cuts):
        found = {
            name: torch.cat([piece.tensor for piece in pieces], dim).tolist()
            for name, pieces in cut.items()
        }
        assert as_lists(full) == found


def _from_local(rank: Rank) -> tuple[str, tuple[int, ...]]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as ShardPlacement

    mesh = rank.mesh(2)
    local = counted(5, 2)[3 * rank.rank :][: 3 - rank.rank].contiguous()
    placements = [ShardPlacement(0)]
    unknown = DTensor.from_local(local, mesh, placements)
    refused = rank.refusal({"layer.w": unknown})
    weight = DTensor.from_local(
        local, mesh, placements, shape=torch.Size((5, 2)), stride=(2, 1)
    )
    rank.push({"layer.w": weight})
    return refused, tuple(unknown.shape)


async def test_ranks_that_infer_different_global_shapes_are_refused(
    processes: Processes, address: str
) -> None:
    whole = filled(5, 2)
    team = Team(processes, address, 2, _from_local)
    async with joined(team, [{"layer.w": whole}]) as replicas:
        (update,) = await replicas.receive()
    refused, shapes = zip(*team.results(), strict=True)

    assert ((6, 2), (4, 2)) == shapes
    assert 1 == len(set(refused))
    assert refused[0].startswith("PlanError: ")
    assert ["'layer.w'" in refused[0], "(6, 2)" in refused[0]] == [True, True]
    assert "(4, 2)" in refused[0]
    assert (1, counted(5, 2).tolist()) == (update.version, whole.tolist())


def small_model() -> nn.Module:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.5, 2.5]]))
        model.bias.fill_(3.5)
    return model


def _with_nothing(rank: Rank) -> list[list[int]]:
    mesh = rank.mesh(rank.world)
    state_dict: dict[str, Any] = {
        **fsdp(small_model(), mesh).state_dict(),
        "rows": sharded(counted(3, 2), mesh, 0),
        "none": torch.ones(0, 4),
        "no rows": sharded(torch.ones(0, 4), mesh, 0),
        "normal": counted(3),
    }
    rank.push(state_dict)
    return [list(local_of(state_dict[name]).shape) for name in ("weight", "rows")]


@pytest.mark.parametrize("trainers", [2, 4])
async def test_ranks_that_own_nothing_take_part(
    processes: Processes, address: str, trainers: int
) -> None:
    whole = {
        "none": filled(0, 4),
        "rows": filled(3, 2),
        "normal": filled(3),
        "no rows": filled(0, 4),
        "weight": filled(1, 2),
        "bias": filled(1),
    }
    team = Team(processes, address, trainers, _with_nothing)
    await delivered(team, [whole])
    held = team.results()

    assert {
        "none": [],
        "rows": [[0, 1], [2, 3], [4, 5]],
        "normal": [0, 1, 2],
        "no rows": [],
        "weight": [[1.5, 2.5]],
        "bias": [3.5],
    } == as_lists(whole)
    assert [[1, 2]] + [[0, 2]] * (trainers - 1) == [weight for weight, _ in held]
    assert {2: [2, 1], 4: [1, 1, 1, 0]}[trainers] == [rows for _, (rows, _) in held]


WEIGHT = counted(8, 6)


def piece(rows: slice, columns: slice = slice(0, 6)) -> dict[str, Any]:
    """Destinations for a part of WEIGHT and for all of the bias."""
    place = filled(*WEIGHT[rows, columns].shape)
    offsets = rows.start, columns.start
    shard = Shard(place, global_shape=(8, 6), offsets=offsets)
    return {"w": shard, "bias": filled(8)}


UPPER, LOWER, ALL = slice(0, 4), slice(4, 8), slice(0, 8)
LEFT, RIGHT = slice(0, 3), slice(3, 6)

POOL = {
    "one replica whose ranks hold the same rows": [[(UPPER,), (UPPER,)]],
    "two replicas that hold the same rows": [[(UPPER,)], [(UPPER,)]],
}


def _one_pool(rank: Rank, replicas: int) -> Any:
    mesh = rank.mesh(2)
    weight = sharded(WEIGHT, mesh, 0)
    state_dict = {"w": weight, "bias": sharded(counted(8), mesh, None)}
    return rank.push(state_dict, replicas=replicas)


@pytest.mark.parametrize("case", POOL)
async def test_one_push_fills_a_pool_of_every_layout(
    processes: Processes, address: str, case: str
) -> None:
    cuts = [
        [(ALL,)],
        [(UPPER,), (LOWER,)],
        [(ALL, LEFT), (ALL, RIGHT)],
        *POOL[case],
    ]
    layouts = [[piece(*cut) for cut in replica] for replica in cuts]
    team = Team(processes, address, 2, _one_pool, len(cuts))
    updates = await delivered(team, *layouts)
    reports = team.results()

    ranks = [rank for replica in layouts for rank in replica]
    wanted = [WEIGHT[cut] for replica in cuts for cut in replica]
    assert [w.tolist() for w in wanted] == [r["w"].tensor.tolist() for r in ranks]
    assert [counted(8).tolist()] * 7 == [rank["bias"].tolist() for rank in ranks]
    assert [1] * 7 == [update.version for update in updates]
    assert [w.nbytes + 32 for w in wanted] == [update.nbytes for update in updates]
    assert 96 + 32 == updates[3].nbytes
    assert reports[0] == reports[1]
    assert sum(update.nbytes for update in updates) == reports[0].nbytes
