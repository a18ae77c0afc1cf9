"""Tied weights: one tensor with several names, on either side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.rig import MODES, Mode, open_job

pytestmark = pytest.mark.anyio

EMBEDDING = torch.arange(15.0).reshape(5, 3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def untied() -> dict[str, Tensor]:
    return {name: torch.full((5, 3), -777.0) for name in ("e", "h")}


def tied() -> dict[str, Tensor]:
    shared = torch.full((5, 3), -777.0)
    return {"e": shared, "h": shared.view(5, 3)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trainers", [1, 2])
async def test_a_tied_source_fills_untied_destinations(
    mode: Mode, trainers: int
) -> None:
    shared = EMBEDDING.clone()
    weights = untied()
    async with open_job(trainers) as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, {"e": shared, "h": shared})

    expected = EMBEDDING.tolist()
    assert {"e": expected, "h": expected} == {n: t.tolist() for n, t in weights.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["e", "h"])
async def test_one_name_is_enough_for_tied_destinations(mode: Mode, name: str) -> None:
    weights = tied()
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, {name: EMBEDDING})
        same = weights["e"].data_ptr() == weights["h"].data_ptr()

    expected = EMBEDDING.tolist()
    assert [expected, expected] == [tensor.tolist() for tensor in weights.values()]
    assert same


async def test_one_name_is_not_enough_for_untied_destinations() -> None:
    weights = untied()
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        outcomes = await job.outcomes({"e": EMBEDDING})
        await job.deliver(generator, {"e": EMBEDDING, "h": EMBEDDING})

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("missing: 'h'" in str(error) for error in outcomes)
    assert EMBEDDING.tolist() == weights["h"].tolist()


@pytest.mark.parametrize("trainers", [1, 2])
async def test_equal_values_under_both_names_fill_tied_destinations(
    trainers: int,
) -> None:
    weights = tied()
    async with open_job(trainers) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, {"e": EMBEDDING.clone(), "h": EMBEDDING.clone()})

    assert EMBEDDING.tolist() == weights["e"].tolist() == weights["h"].tolist()


@pytest.mark.parametrize("trainers", [1, 2])
async def test_different_values_for_one_storage_are_refused(trainers: int) -> None:
    weights = tied()
    async with open_job(trainers) as job:
        generator = await job.join_one(weights)
        conflict = {"e": EMBEDDING, "h": EMBEDDING + 100}
        outcomes = await job.outcomes(conflict) + await job.outcomes(conflict)
        before = weights["e"].tolist()
        await job.deliver(generator, {"e": EMBEDDING, "h": EMBEDDING.clone()})

    assert [weightsync.PlanError] * trainers * 2 == [type(error) for error in outcomes]
    assert all("'e'" in str(error) and "'h'" in str(error) for error in outcomes)
    assert [[-777.0] * 3] * 5 == before
    assert EMBEDDING.tolist() == weights["h"].tolist()


async def test_values_under_tied_names_are_compared_between_ranks() -> None:
    weights = tied()
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        outcomes = await job.outcomes({"e": EMBEDDING}, {"h": EMBEDDING + 100})
        before = weights["e"].tolist()
        await job.deliver(generator, {"e": EMBEDDING}, {"h": EMBEDDING.clone()})

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("'e' on trainer rank 0 and 'h'" in str(error) for error in outcomes)
    assert [[-777.0] * 3] * 5 == before
    assert EMBEDDING.tolist() == weights["h"].tolist()


async def test_ties_that_are_cut_differently_are_refused() -> None:
    weights = tied()
    half = weightsync.Shard(EMBEDDING[:3], global_shape=(5, 3), offsets=(0, 0))
    rest = weightsync.Shard(EMBEDDING[3:], global_shape=(5, 3), offsets=(3, 0))
    async with open_job(2) as job:
        await job.join_one(weights)
        outcomes = await job.outcomes({"e": EMBEDDING, "h": half}, {"h": rest})

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("cannot be compared" in str(error) for error in outcomes)
    assert [[-777.0] * 3] * 5 == weights["e"].tolist()


async def test_the_tied_head_of_a_module_arrives_with_its_embedding() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    trained, sampled = Model(), Model()
    async with open_job() as job:
        generator = await job.join_one(sampled.state_dict())
        await job.deliver(generator, trained.state_dict())
        await job.deliver(generator, dict(trained.named_parameters()))

    assert torch.equal(trained.embed.weight, sampled.head.weight)
    assert sampled.head.weight is sampled.embed.weight
