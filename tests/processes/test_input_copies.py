"""Copies of one tensor on several trainer ranks that may differ: whole, or refused."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import open_job, together, until_pending
from weightsync import Shard

pytestmark = pytest.mark.anyio

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def hybrid(offset: float = 0.0) -> list[dict[str, object]]:
    """Values 0 to 3 in halves on ranks 0 and 1; again, changed, on ranks 2 and 3."""
    whole = torch.arange(4.0).reshape(4, 1)
    return [
        {
            "w": Shard(
                whole[2 * half : 2 * half + 2] + (offset if copy else 0.0),
                global_shape=(4, 1),
                offsets=(2 * half, 0),
            ),
            "b": torch.ones(3),
        }
        for copy in range(2)
        for half in range(2)
    ]


def empty() -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 1), -777.0), "b": torch.full((3,), -777.0)}


async def test_a_tensor_is_never_mixed_from_copies_that_differ() -> None:
    weights = empty()
    async with open_job(4) as job:
        generator = await job.join_one(weights)
        reports = await job.push(*hybrid(1000.0))
        await generator.receive(timeout=10)

    first = [0.0, 1.0, 2.0, 3.0]
    assert weights["w"].flatten().tolist() in [first, [x + 1000 for x in first]]
    assert 4 * 4 + 3 * 4 == reports[0].nbytes


async def test_copies_that_differ_are_refused_where_that_is_asked() -> None:
    weights = empty()
    async with open_job(4) as job:
        generator = await job.join_one(weights)
        outcomes = await job.outcomes(*hybrid(1000.0), check_replicas=True)
        before = weights["w"].flatten().tolist()
        for _ in range(2):
            await job.deliver(generator, *hybrid(), check_replicas=True)

    assert [weightsync.PlanError] * 4 == [type(error) for error in outcomes]
    assert 1 == len({str(error) for error in outcomes})
    for words in ("'w'", "[0:2, 0:1]", "trainer rank 0 and", "trainer rank 2"):
        assert words in str(outcomes[0])
    assert [-777.0] * 4 == before
    assert [0.0, 1.0, 2.0, 3.0] == weights["w"].flatten().tolist()


@pytest.mark.parametrize("checked", [False, True])
async def test_plain_tensors_of_one_name_with_different_values(checked: bool) -> None:
    held = [{"experts.0": torch.full((2, 2), float(rank))} for rank in range(2)]
    weights = {"experts.0": torch.full((2, 2), -777.0)}
    async with open_job(2) as job:
        await job.join_one(weights)
        outcomes = await job.outcomes(*held, check_replicas=checked)

    if checked:
        expected = "has different values: on trainer rank 0 and on trainer rank 1"
        assert all(expected in str(error) for error in outcomes)
        assert [[-777.0] * 2] * 2 == weights["experts.0"].tolist()
    else:
        assert [("gen-0",)] * 2 == [report.delivered for report in outcomes]


@pytest.mark.parametrize("option", ["check_replicas", "cast", "partial"])
async def test_ranks_that_disagree_about_an_option_are_refused(option: str) -> None:
    weights = {"w": torch.full((4,), -777.0)}
    source = {"w": torch.ones(4)}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        first, second = job.trainers
        options: dict[str, Any] = {option: True}
        outcomes = await together(
            lambda: first.push(source), lambda: second.push(source, **options)
        )
        await job.deliver(generator, source)

    message = f"{option} is False on rank 0 and True on rank 1"
    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all(message in str(error) for error in outcomes)
    assert [1.0] * 4 == weights["w"].tolist()


async def test_a_push_that_is_cancelled_while_copies_are_compared_ends_soon() -> None:
    source = {"w": torch.zeros(256 * MIB, dtype=torch.uint8)}
    weights = {"w": torch.ones(256 * MIB, dtype=torch.uint8)}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        started = anyio.current_time()
        with anyio.move_on_after(0.05) as given_up:
            await job.push(source, check_replicas=True)
        seconds = anyio.current_time() - started
        await job.push(source)
        await until_pending(generator, 1)

    assert given_up.cancelled_caught
    assert seconds < 1


@pytest.mark.parametrize("checked", [False, True])
async def test_pairs_of_names_and_tensors_are_pushed_as_a_mapping_is(
    checked: bool,
) -> None:
    module = torch.nn.Linear(3, 2)
    sampled = torch.nn.Linear(3, 2)
    async with open_job(2) as job:
        generator = await job.join_one(sampled.state_dict())
        for _ in range(3):
            with torch.no_grad():
                module.weight.add_(1)
            pairs = [module.named_parameters() for _ in job.trainers]
            await job.deliver(generator, *pairs, check_replicas=checked)

    assert torch.equal(module.weight, sampled.weight)
    assert torch.equal(module.bias, sampled.bias)
