"""Trainers of every kind: pipeline stages, experts, mixtures, changing layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
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
from tests.processes.meshes import (
    generator as make_generator,
)
from tests.processes.rig import SECONDS, open_job
from weightsync import PlanError, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.harness import Processes
    from tests.processes.meshes import Rank

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def layer(number: int) -> nn.Linear:
    model = nn.Linear(3, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(*parameter.shape) + 100 * number)
    return model


def _stages(rank: Rank) -> list[str]:
    mesh = rank.mesh(2, 2, names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    mine = range(2 * stage, 2 * stage + 2)
    state_dict: dict[str, torch.Tensor] = {}
    for number in mine:
        held = fsdp(layer(number), mesh["dp"]).state_dict()
        state_dict |= {f"layers.{number}.{name}": held[name] for name in held}
    if stage == 0:
        state_dict["embedding"] = counted(4)
    rank.push(state_dict)
    return list(state_dict)


async def test_each_pipeline_stage_pushes_its_own_names(
    processes: Processes, address: str
) -> None:
    expected = {
        f"layers.{number}.{name}": parameter.detach()
        for number in range(4)
        for name, parameter in layer(number).named_parameters()
    } | {"embedding": counted(4)}
    whole = {name: torch.full_like(tensor, -777) for name, tensor in expected.items()}
    team = Team(processes, address, 4, _stages)
    await delivered(team, [whole])
    names = team.results()

    assert as_lists(expected) == as_lists(whole)
    assert [5, 5, 4, 4] == [len(held) for held in names]
    assert set() == set(names[0]) & set(names[2])


EXPERTS = 6


def expert(number: int) -> torch.Tensor:
    return counted(2, 4) + 10 * number


def _experts(rank: Rank) -> int:
    mesh = rank.mesh(2, 2, names=("ep", "dp"))
    own = EXPERTS // 2
    first = own * mesh["ep"].get_local_rank()
    plain = {f"experts.{n}.w": expert(n) for n in range(first, first + own)}
    stacked = torch.stack([expert(number) for number in range(EXPERTS)])
    by_hand = Shard(
        stacked[first : first + own], global_shape=(6, 2, 4), offsets=(first, 0, 0)
    )
    state_dict = {
        **plain,
        "stacked": sharded(stacked, mesh["ep"], 0),
        "by hand": by_hand,
        "two ways": sharded(stacked, mesh, 0, 1),
        "one way twice": sharded(stacked, mesh, 0, 0),
        **fsdp(layer(7), mesh["dp"]).state_dict(),
        "norm": counted(4),
    }
    rank.transport.wait_for_replicas(1)
    return rank.transport.push(state_dict, check_replicas=True).nbytes


async def test_experts_and_every_other_kind_of_entry_go_in_one_push(
    processes: Processes, address: str
) -> None:
    stacked = torch.stack([expert(number) for number in range(EXPERTS)])
    expected = {
        "norm": counted(4),
        "bias": layer(7).bias.detach(),
        "weight": layer(7).weight.detach(),
        "one way twice": stacked,
        "two ways": stacked,
        "by hand": stacked,
        "stacked": stacked,
        **{f"experts.{n}.w": expert(n) for n in range(EXPERTS)},
    }
    whole = {name: torch.full_like(tensor, -777) for name, tensor in expected.items()}
    team = Team(processes, address, 4, _experts)
    await delivered(team, [whole])

    assert [sum(tensor.nbytes for tensor in whole.values())] * 4 == team.results()
    assert as_lists(expected) == as_lists(whole)


def _redistributed(rank: Rank) -> list[tuple[int, ...]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    weight = sharded(counted(5, 3), rank.mesh(2), 0)
    shapes = []
    for version, placement in enumerate(
        [ShardPlacement(0), ShardPlacement(1), Replicate(), ShardPlacement(0)], 1
    ):
        weight = weight.redistribute(placements=[placement])
        shapes.append(tuple(local_of(weight).shape))
        rank.push({"w": weight * version})
    rank.push(
        {
            "w": Shard(
                counted(5, 3)[2 * rank.rank :][: 2 + rank.rank] * 5,
                global_shape=(5, 3),
                offsets=(2 * rank.rank, 0),
            )
        }
    )
    return shapes


async def test_a_layout_that_changes_between_pushes_is_planned_anew(
    processes: Processes, address: str
) -> None:
    whole, found = filled(5, 3), []
    team = Team(processes, address, 2, _redistributed)
    async with joined(team, [{"w": whole}]) as replicas:
        for _ in range(5):
            await replicas.receive()
            found.append(whole.tolist())
            whole.fill_(-777)
    shapes = team.results()

    assert [(counted(5, 3) * version).tolist() for version in range(1, 6)] == found
    assert [(3, 3), (5, 2), (5, 3), (3, 3)] == shapes[0]
    assert [(2, 3), (5, 1), (5, 3), (2, 3)] == shapes[1]


async def test_a_replica_that_comes_back_in_another_layout_gets_that() -> None:
    whole, columns = filled(5, 4), halves(filled(5, 4), 1)
    held = [
        {"w": Shard(counted(5, 4)[rows], global_shape=(5, 4), offsets=(rows.start, 0))}
        for rows in (slice(0, 3), slice(3, 5))
    ]
    async with open_job(2) as job:
        generator = await job.join_one({"w": whole}, replica="gen-0")
        await job.deliver(generator, *held)
        await generator.aclose()
        for trainer in job.trainers:
            while trainer.replicas:
                await anyio.sleep(0.01)
        ranks = [
            await job.enter(one)
            for one in (
                make_generator(job.address, [{"w": c} for c in columns], 0, rank)
                for rank in range(2)
            )
        ]
        for trainer in job.trainers:
            await trainer.wait_for_replicas(1, timeout=SECONDS)
        updates = await job.deliver(ranks, *held)

    assert counted(5, 4).tolist() == whole.tolist()
    assert whole.tolist() == torch.cat([c.tensor for c in columns], 1).tolist()
    assert [(2, 40)] * 2 == [(update.version, update.nbytes) for update in updates]


def router(number: int) -> torch.Tensor:
    """Experts are of bfloat16; between them lies a bias of float32."""
    if number == 5:
        return torch.full((3,), 0.1)
    return torch.full((2, 2), float(number), dtype=torch.bfloat16)


NAMES = [f"experts.{n}" if n != 5 else "router.bias" for n in range(12)]
ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "ascending": list,
    "by text": sorted,
    "reversed": lambda names: names[::-1],
}


@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("second", ORDERS)
async def test_the_orders_of_dicts_do_not_matter(first: str, second: str) -> None:
    values = {name: router(number) for number, name in enumerate(NAMES)}
    held = [
        {name: values[name] for name in ORDERS[order](NAMES)}
        for order in (first, second)
    ]
    whole = {name: torch.full_like(values[name], -777) for name in NAMES[::-1]}
    async with open_job(2) as job:
        generator = await job.join_one(whole)
        await job.deliver(generator, *held, check_replicas=True)

    assert as_lists(values) == as_lists(whole)


async def test_plain_values_that_differ_are_refused_or_come_from_one_rank() -> None:
    held = [
        {"experts.0": torch.full((64,), float(rank)), "norm": torch.ones(3)}
        for rank in range(2)
    ]
    whole = {"experts.0": filled(64), "norm": filled(3)}
    async with open_job(2) as job:
        generator = await job.join_one(whole)
        errors = await job.outcomes(*held, check_replicas=True)
        untouched = [tensor.unique().tolist() for tensor in whole.values()]
        await job.deliver(generator, *held)

    assert [PlanError] * 2 == [type(error) for error in errors]
    assert str(errors[0]) == str(errors[1])
    assert "'experts.0'" in str(errors[0])
    assert all(f"trainer rank {rank}" in str(errors[0]) for rank in (0, 1))
    assert "norm" not in str(errors[0])
    assert [[-777.0]] * 2 == untouched
    assert whole["experts.0"].unique().tolist() in ([0.0], [1.0])
    assert [1.0] * 3 == whole["norm"].tolist()
