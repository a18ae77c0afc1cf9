"""Layouts that cannot be: every rank gets the error, before any byte has moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.processes.meshes import (
    Team,
    as_lists,
    counted,
    filled,
    fsdp,
    joined,
)
from tests.processes.rig import open_job
from weightsync import PlanError, Shard

if TYPE_CHECKING:
    from tests.processes.harness import Processes
    from tests.processes.meshes import Rank

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def build() -> nn.Module:
    """Two layers whose weights hold the numbers from 0 on."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(*parameter.shape))
    return model


def sharded_model(rank: Rank) -> Any:
    model = build()
    mesh = rank.mesh(rank.world)
    for layer in model.children():
        fsdp(layer, mesh)
    return fsdp(model, mesh)


def _with_a_gap(rank: Rank) -> str:
    state_dict = sharded_model(rank).state_dict()
    refused = rank.refusal({} if rank.rank == 1 else state_dict)
    rank.push(state_dict)
    return refused


async def test_rows_that_one_rank_fails_to_push_are_named_on_every_rank(
    processes: Processes, address: str
) -> None:
    whole = {"0.weight": filled(5, 3), "1.weight": filled(7, 5)}
    team = Team(processes, address, 3, _with_a_gap)
    async with joined(team, [whole]) as replicas:
        (update,) = await replicas.receive()
    refused = team.results()

    assert 1 == len(set(refused))
    assert refused[0].startswith("PlanError: '0.weight': no trainer holds ")
    assert "[2:4, 0:3]" in refused[0]
    assert 1 == update.version
    assert as_lists(dict(build().named_parameters())) == as_lists(whole)


def _shard(value: torch.Tensor, start: int, shape: tuple[int, ...]) -> Shard:
    offsets = (start, *[0] * (value.dim() - 1))
    return Shard(value, global_shape=shape, offsets=offsets)


FULL = counted(6, 4)
BROKEN: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "ranks disagree about the rows": (
        [_shard(FULL[:3], 0, (6, 4)), _shard(FULL[3:], 3, (7, 4))],
        ("(6, 4)", "(7, 4)", "rank 0", "rank 1"),
    ),
    "ranks disagree about the order of dims": (
        [FULL, FULL.t().contiguous()],
        ("(6, 4)", "(4, 6)", "rank 0", "rank 1"),
    ),
    "one dim more than the replica": ([FULL[None]] * 2, ("(1, 6, 4)", "(6, 4)")),
    "one row that could be expanded": ([FULL[:1]] * 2, ("(1, 4)", "(6, 4)")),
    "as many elements in another shape": (
        [FULL.reshape(8, 3)] * 2,
        ("(8, 3)", "(6, 4)"),
    ),
    "rows that overlap": (
        [_shard(FULL[:4], 0, (6, 4)), _shard(FULL[3:], 3, (6, 4))],
        ("[0:4, 0:4]", "[3:6, 0:4]", "rank 0", "rank 1", "[3:4, 0:4]"),
    ),
    "a row that nobody has": (
        [_shard(FULL[:3], 0, (6, 4)), _shard(FULL[4:], 4, (6, 4))],
        ("no trainer holds", "[3:4, 0:4]"),
    ),
    "ranks disagree about the dtype": (
        [_shard(FULL[:3], 0, (6, 4)), _shard(FULL[3:].half(), 3, (6, 4))],
        ("float32", "float16", "rank 0", "rank 1"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_layouts_that_do_not_fit_are_refused_on_every_rank(case: str) -> None:
    entries, parts = BROKEN[case]
    whole = {"good": filled(3), "layer.w": filled(6, 4)}
    async with open_job(2) as job:
        generator = await job.join_one(whole)
        held = [{"good": torch.ones(3), "layer.w": entry} for entry in entries]
        errors = await job.outcomes(*held)
        untouched = [tensor.unique().tolist() for tensor in whole.values()]
        await job.deliver(generator, {"good": torch.ones(3), "layer.w": FULL})

    assert all(isinstance(error, PlanError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert all(part in str(errors[0]) for part in ("'layer.w'", *parts))
    assert [[-777.0]] * 2 == untouched
    assert FULL.tolist() == whole["layer.w"].tolist()


REPLICAS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "a gap": (
        [_shard(filled(2, 4), 0, (6, 4)), _shard(filled(3, 4), 3, (6, 4))],
        ("[2:3, 0:4]",),
    ),
    "an overlap": (
        [_shard(filled(4, 4), 0, (6, 4)), _shard(filled(3, 4), 3, (6, 4))],
        ("[0:4, 0:4]", "[3:6, 0:4]", "rank 0", "rank 1"),
    ),
    "two shapes": (
        [_shard(filled(3, 4), 0, (6, 4)), _shard(filled(3, 4), 3, (7, 4))],
        ("(6, 4)", "(7, 4)"),
    ),
}


@pytest.mark.parametrize("case", REPLICAS)
async def test_what_the_ranks_of_a_replica_leave_out_or_hold_twice_is_refused(
    case: str,
) -> None:
    entries, parts = REPLICAS[case]
    async with open_job(2) as job:
        await job.join(*[{"layer.w": entry} for entry in entries])
        errors = await job.outcomes({"layer.w": FULL})

    assert all(isinstance(error, PlanError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    found = [
        part for part in ("'layer.w'", "'gen-0'", *parts) if part not in str(errors[0])
    ]
    assert [] == found
    assert all((entry.tensor == -777).all() for entry in entries)


# What FSDP has at different times

Outcome = tuple[str, str, str, dict[str, Any]]
"""When, what was pushed, what became of it, and the true values at that time."""


def _at_every_moment(rank: Rank) -> list[Outcome]:
    mesh, model = rank.mesh(rank.world), build()
    for layer, keep in zip(model.children(), (False, True), strict=True):
        fsdp(layer, mesh, reshard_after_forward=not keep)
    sharded: Any = fsdp(model, mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    parameters: dict[str, Any] = dict(sharded.named_parameters())
    captured: dict[str, Any] = {
        "first parameters": parameters,
        "first state": sharded.state_dict(),
    }
    outcomes: list[Outcome] = []

    def push(moment: str) -> None:
        for label, given in captured.items():
            truth = {name: p.full_tensor() for name, p in parameters.items()}
            outcomes.append((moment, label, rank.refusal(given), as_lists(truth)))

    push("before forward")
    loss = sharded(torch.ones(2, 3)).sum()
    captured["gathered"] = dict(sharded.named_parameters())
    push("after forward")
    loss.backward()
    optimizer.step()
    captured["pairs"] = list(sharded.named_parameters())
    push("after step")
    for layer in sharded.children():
        layer.unshard()
    captured["all gathered"] = dict(sharded.named_parameters())
    push("unsharded")
    captured["new state"] = sharded.state_dict()
    push("resharded")
    return outcomes


REFUSED = [
    ("after forward", "gathered"),
    ("after step", "gathered"),
    ("unsharded", "gathered"),
    ("unsharded", "all gathered"),
    ("resharded", "gathered"),
    ("resharded", "all gathered"),
]


async def test_what_fsdp_gave_at_any_time_arrives_exactly_or_is_refused(
    processes: Processes, address: str
) -> None:
    whole = {"0.weight": filled(5, 3), "1.weight": filled(7, 5)}
    team = Team(processes, address, 2, _at_every_moment)
    async with joined(team, [whole]) as replicas:
        (transport,) = replicas
        received = [as_lists(whole) async for _ in transport]
    first, second = team.results()

    accepted = [values for *_, error, values in first if error == "no error"]
    refused = [outcome for outcome in first if outcome[2] != "no error"]
    assert first == second
    assert accepted == received
    assert accepted[0] != accepted[-1]
    assert REFUSED == [(moment, label) for moment, label, *_ in refused]
    assert all("'1.weight'" in e or "'0.weight'" in e for _, _, e, _ in refused)
