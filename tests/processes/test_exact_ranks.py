"""Several trainer ranks and several generator ranks: who holds and who gets what."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import Guarded, Source, open_job, receive_all
from weightsync import Shard

pytestmark = pytest.mark.anyio

WEIGHT = torch.arange(48.0).reshape(8, 6)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def piece(rows: slice, columns: slice) -> Shard:
    """A guarded shard of WEIGHT, full of sentinels."""
    shape = WEIGHT[rows, columns].shape
    offsets = (rows.start or 0, columns.start or 0)
    place = Guarded(*shape)
    return Shard(place.tensor, global_shape=(8, 6), offsets=offsets)


@pytest.mark.parametrize("trainers", [1, 2, 3])
async def test_what_several_ranks_hold_is_sent_once(trainers: int) -> None:
    source = {"small": torch.arange(100.0), "large": torch.arange(float(1 << 20))}
    weights = {name: torch.full_like(tensor, -777.0) for name, tensor in source.items()}
    async with open_job(trainers) as job:
        generator = await job.join_one(weights)
        reports = await job.push(source)
        update = await generator.receive(timeout=10)

    nbytes = sum(tensor.nbytes for tensor in source.values())
    assert all(torch.equal(source[name], weights[name]) for name in source)
    assert nbytes == update.nbytes == reports[0].nbytes


async def test_each_rank_may_push_names_of_its_own() -> None:
    names = [f"experts.{i}" for i in range(12)]
    held = [
        {name: torch.full((2, 2), float(i)) for i, name in enumerate(names) if i < 6},
        {name: torch.full((2, 2), float(i)) for i, name in enumerate(names) if i >= 6},
    ]
    weights = {name: torch.full((2, 2), -777.0) for name in reversed(names)}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        for _ in range(2):
            await job.deliver(generator, *held)

    assert [[[float(i)] * 2] * 2 for i in range(12)] == [
        weights[name].tolist() for name in names
    ]


async def test_a_rank_may_have_nothing_to_push() -> None:
    weights = {"w": torch.full((3,), -777.0)}
    async with open_job(3) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, {}, {"w": torch.ones(3)}, {})

    assert [1.0] * 3 == weights["w"].tolist()


async def test_the_order_of_names_does_not_matter() -> None:
    names = [f"layer.{i}" for i in range(12)]
    dtypes = [torch.bfloat16 if i % 3 else torch.float32 for i in range(12)]
    source = {
        name: torch.full((i + 1,), float(i), dtype=dtypes[i])
        for i, name in enumerate(names)
    }
    by_text = {name: source[name] for name in sorted(source)}
    weights = {name: torch.zeros_like(source[name]) for name in reversed(names)}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, source, by_text)

    assert all(torch.equal(source[name], weights[name]) for name in names)


async def test_one_push_fills_replicas_of_every_layout() -> None:
    rows = [slice(0, 4), slice(4, 8)]
    held = [
        {
            "w": Shard(WEIGHT[cut], global_shape=(8, 6), offsets=(cut.start, 0)),
            "bias": torch.arange(8.0),
        }
        for cut in rows
    ]
    everything = slice(0, 8)
    layouts = {
        "full": [(everything, slice(0, 6))],
        "rows": [(cut, slice(0, 6)) for cut in rows],
        "columns": [(everything, slice(0, 3)), (everything, slice(3, 6))],
        "replicated": [
            (rows[0], slice(0, 6)),
            (rows[1], slice(0, 6)),
            (rows[0], slice(0, 6)),
        ],
        "alike": [(rows[0], slice(0, 6)), (rows[0], slice(0, 6))],
        "corner": [(slice(2, 7), slice(1, 5))],
    }
    found: dict[str, Any] = {}
    versions = []
    async with open_job(2) as job:
        replicas = {}
        for name, cuts in layouts.items():
            ranks: list[dict[str, Any]] = [
                {"w": piece(*cut), "bias": torch.full((8,), -777.0)} for cut in cuts
            ]
            generators = await job.join(*ranks, replica=name)
            replicas[name] = (ranks, generators)
        reports = await job.push(*held)
        for name, (ranks, generators) in replicas.items():
            updates = await receive_all(generators)
            versions += [update.version for update in updates]
            found[name] = [
                (rank["w"].tensor.tolist(), rank["bias"].tolist()) for rank in ranks
            ]

    expected = {
        name: [(WEIGHT[cut].tolist(), list(range(8))) for cut in cuts]
        for name, cuts in layouts.items()
    }
    assert expected == found
    assert {1} == set(versions)
    assert tuple(layouts) == reports[0].delivered
    assert reports[0] == reports[1]


async def test_the_ranks_of_a_replica_may_hold_different_names() -> None:
    first, second = Guarded(4), Guarded(5)
    async with open_job(2) as job:
        generators = await job.join({"a": first.tensor}, {"b": second.tensor})
        pushed = {"a": torch.arange(4.0), "b": torch.arange(5.0)}
        updates = await job.deliver(generators, pushed)
        outcomes = await job.outcomes({"a": torch.arange(4.0)})

    assert [[0, 1, 2, 3], [0, 1, 2, 3, 4]] == [
        first.tensor.tolist(),
        second.tensor.tolist(),
    ]
    assert [16, 20] == [update.nbytes for update in updates]
    assert first.intact
    assert second.intact
    assert all("missing: 'b'" in str(error) for error in outcomes)


async def test_ranks_that_a_partial_push_does_not_reach_change_version_too() -> None:
    weights = {"a": torch.zeros(2)}, {"b": torch.zeros(2)}
    async with open_job(2) as job:
        generators = await job.join(*weights)
        await job.deliver(generators, {"a": torch.ones(2), "b": torch.ones(2)})
        updates = await job.deliver(
            generators, {"b": torch.full((2,), 2.0)}, partial=True
        )
        versions = [generator.version for generator in generators]

    assert [2, 2] == versions == [update.version for update in updates]
    assert [0, 8] == [update.nbytes for update in updates]
    assert [[1.0, 1.0], [2.0, 2.0]] == [
        weights[0]["a"].tolist(),
        weights[1]["b"].tolist(),
    ]


async def test_a_version_is_not_whole_before_every_rank_has_opened_a_slot() -> None:
    weights = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
    async with open_job() as job:
        first, second = await job.join(*weights)
        await job.push({"w": torch.ones(2)})
        await first.receive(timeout=10)
        with anyio.move_on_after(0.2) as waited:
            await job.push({"w": torch.full((2,), 2.0)})
        ahead = first.pending
        await second.receive(timeout=10)
        versions = (first.version, second.version)
        await job.deliver([first, second], {"w": torch.full((2,), 3.0)})

    assert waited.cancelled_caught
    assert (None, (1, 1)) == (ahead, versions)
    assert [3.0, 3.0] == weights[0]["w"].tolist() == weights[1]["w"].tolist()


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (5, 1)])
async def test_uneven_shards_on_both_sides_fit_exactly(shape: tuple[int, int]) -> None:
    weight = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    held, at = [], 0
    for part in weight.tensor_split(3):
        held.append({"w": Shard(part, global_shape=shape, offsets=(at, 0))})
        at += len(part)
    ranks, at = [], 0
    for part in weight.tensor_split(2, dim=1):
        place = torch.full_like(part, -777.0).contiguous()
        ranks.append({"w": Shard(place, global_shape=shape, offsets=(0, at))})
        at += part.shape[1]
    sources = [Source({"w": shards["w"].tensor}) for shards in held]
    async with open_job(3) as job:
        generators = await job.join(*ranks)
        await job.deliver(generators, *held)

    found = torch.cat([rank["w"].tensor for rank in ranks], dim=1)
    assert weight.tolist() == found.tolist()
    assert all(source.untouched for source in sources)


async def test_what_no_trainer_holds_is_refused() -> None:
    weights = {"w": torch.full((8, 6), -777.0)}
    held = [
        {"w": Shard(WEIGHT[:4], global_shape=(8, 6), offsets=(0, 0))},
        {"w": Shard(WEIGHT[5:], global_shape=(8, 6), offsets=(5, 0))},
    ]
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        outcomes = await job.outcomes(*held)
        untouched = bool((weights["w"] == -777).all())
        await job.deliver(generator, {"w": WEIGHT})

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("no trainer holds [4:5, 0:6] of box" in str(error) for error in outcomes)
    assert untouched
    assert WEIGHT.tolist() == weights["w"].tolist()
