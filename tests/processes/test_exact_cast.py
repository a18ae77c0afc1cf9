"""With ``cast=True`` floating point tensors arrive rounded as torch rounds them."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.rig import (
    MODES,
    SECONDS,
    Guarded,
    Mode,
    Source,
    open_job,
    raw,
    together,
    until_pending,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.anyio

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.00390625, 1.01171875, 1e-40, 465.0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The bytes of each; a NaN as zeros, since torch makes now this one, now that."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return {
        name: raw(torch.where(tensor.double().isnan(), zeros[name], tensor))
        for name, tensor in tensors.items()
    }


def nans(tensors: Mapping[str, Tensor]) -> dict[str, list[bool]]:
    return {n: t.double().isnan().reshape(-1).tolist() for n, t in tensors.items()}


def rows_of(tensor: Tensor, start: int, stop: int) -> weightsync.Shard:
    offsets = (start,) + (0,) * (tensor.dim() - 1)
    part = tensor[start:stop]
    return weightsync.Shard(part, global_shape=tuple(tensor.shape), offsets=offsets)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_fp32_masters_arrive_in_bf16_rounded_to_the_nearest_even(
    mode: Mode, trainers: int
) -> None:
    source = {"w": torch.tensor([1.00390625, 1.01171875, 1e-40])}
    before = Source(source)
    guarded = Guarded(3, dtype=torch.bfloat16)
    weight = guarded.tensor if mode == "staged" else guarded.tensor.clone()
    async with open_job(trainers) as job:
        generator = await job.join_one({"w": weight}, mode=mode)
        (update,) = await job.deliver(generator, source, cast=True)
        found = weight.tolist()

    assert [1.0, 1.015625, 9.183549615799121e-41] == found
    assert 6 == update.nbytes
    assert guarded.intact
    assert before.untouched


@pytest.mark.parametrize("pushed", FLOATS, ids=str)
async def test_each_floating_point_dtype_is_converted_into_each_other(
    pushed: torch.dtype,
) -> None:
    values = torch.tensor(ODD, dtype=torch.float64).to(pushed)
    source = {str(dtype): values for dtype in FLOATS}
    weights = {str(dtype): torch.zeros(len(ODD)).to(dtype) for dtype in FLOATS}
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, source, cast=True)

    expected = {str(dtype): values.to(dtype) for dtype in FLOATS}
    assert nans(expected) == nans(weights)
    assert bytes_of(expected) == bytes_of(weights)
    assert raw(values) == raw(weights[str(pushed)])


async def test_shards_of_two_trainers_arrive_in_strided_parts_of_larger_buffers() -> (
    None
):
    whole = torch.randn(7, 40, dtype=torch.float64)
    halves = [{"w": rows_of(whole, 0, 3)}, {"w": rows_of(whole, 3, 7)}]
    buffers = [torch.full((9, 50), -1.0, dtype=torch.bfloat16) for _ in range(2)]
    shards = [
        weightsync.Shard(
            buffer[1:8, 3:23], global_shape=(7, 40), offsets=(0, 20 * rank)
        )
        for rank, buffer in enumerate(buffers)
    ]
    async with open_job(2) as job:
        generators = await job.join({"w": shards[0]}, {"w": shards[1]})
        await job.deliver(generators, *halves, cast=True)

    expected = [torch.full((9, 50), -1.0, dtype=torch.bfloat16) for _ in range(2)]
    for rank, buffer in enumerate(expected):
        buffer[1:8, 3:23] = whole[:, 20 * rank : 20 * rank + 20].to(torch.bfloat16)
    assert [raw(buffer) for buffer in expected] == [raw(buffer) for buffer in buffers]


@pytest.mark.parametrize("mode", MODES)
async def test_replicas_of_other_dtypes_are_served_by_one_push(mode: Mode) -> None:
    whole = torch.randn(6, 5)
    halves = [{"w": rows_of(whole, 0, 2)}, {"w": rows_of(whole, 2, 6)}]
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float32]
    ranks = [[torch.zeros(3, 5).to(dtype) for _ in range(2)] for dtype in dtypes]
    async with open_job(2) as job:
        generators: list[weightsync.Generator] = []
        for first, second in ranks:
            generators += await job.join(
                {"w": weightsync.Shard(first, global_shape=(6, 5), offsets=(0, 0))},
                {"w": weightsync.Shard(second, global_shape=(6, 5), offsets=(3, 0))},
                mode=mode,
            )
        await job.deliver(generators, *halves, cast=True)
        found = [[raw(tensor) for tensor in pair] for pair in ranks]

    parts = [whole[:3], whole[3:]]
    assert [[raw(part.to(dtype)) for part in parts] for dtype in dtypes] == found


@pytest.mark.parametrize("mode", MODES)
async def test_what_needs_no_conversion_arrives_beside_what_does(mode: Mode) -> None:
    source = {
        "a": torch.randn(300, 7),
        "b": torch.arange(11),
        "c": torch.randn(64),
        "d": torch.randn(5, dtype=torch.float64),
    }
    dtypes = {"a": torch.float16, "b": torch.int64, "c": torch.float32}
    dtypes["d"] = torch.float8_e5m2
    weights = {n: torch.zeros_like(t, dtype=dtypes[n]) for n, t in source.items()}
    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)
        found = []
        for _ in range(3):
            for tensor in source.values():
                tensor.add_(1)
            (update,) = await job.deliver(generator, source, cast=True)
            found.append({name: raw(tensor) for name, tensor in weights.items()})

    expected = {name: raw(tensor.to(dtypes[name])) for name, tensor in source.items()}
    assert expected == found[-1]
    assert found[0] != found[1] != found[2]
    assert sum(len(data) for data in expected.values()) == update.nbytes


@pytest.mark.parametrize("mode", MODES)
async def test_a_partial_push_converts_what_it_brings_and_keeps_the_rest(
    mode: Mode,
) -> None:
    first = {"a": torch.randn(33), "b": torch.randn(33)}
    second = {"b": torch.randn(33)}
    weights = {name: torch.zeros(33, dtype=torch.bfloat16) for name in first}
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, first, cast=True)
        await job.deliver(generator, second, cast=True, partial=True)
        found = {name: raw(tensor) for name, tensor in weights.items()}

    expected = {"a": first["a"].bfloat16(), "b": second["b"].bfloat16()}
    assert {name: raw(tensor) for name, tensor in expected.items()} == found


@pytest.mark.parametrize("mode", MODES)
async def test_tied_names_are_converted_whichever_side_ties_them(mode: Mode) -> None:
    shared = torch.randn(4, 3)
    tied = torch.zeros(4, 3, dtype=torch.bfloat16)
    untied = {name: torch.zeros(4, 3, dtype=torch.float16) for name in ("e", "h")}
    async with open_job(2) as job:
        generators = await job.join({"e": tied, "h": tied.view(4, 3)}, mode=mode)
        generators += await job.join(untied, mode=mode)
        await job.deliver(generators, {"e": shared, "h": shared}, cast=True)
        found = [raw(tensor) for tensor in (tied, untied["e"], untied["h"])]

    half = raw(shared.half())
    assert [raw(shared.bfloat16()), half, half] == found


@pytest.mark.parametrize("mode", MODES)
async def test_a_tensor_of_many_batches_arrives_whole(mode: Mode) -> None:
    big = torch.arange(13_000_001, dtype=torch.float32).mul_(1.0001)
    source = {"big": big, "small": torch.randn(17), "same": torch.randn(2_000_000)}
    weights: dict[str, Tensor] = {
        "big": torch.zeros(big.numel(), dtype=torch.bfloat16),
        "small": torch.zeros(17, dtype=torch.float8_e4m3fn),
        "same": torch.zeros(2_000_000),
    }
    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, source, cast=True)
        found = {
            name: torch.equal(
                tensor.view(torch.uint8),
                source[name].to(tensor.dtype).view(torch.uint8),
            )
            for name, tensor in weights.items()
        }

    assert {"big": True, "small": True, "same": True} == found


@pytest.mark.parametrize(
    ("pushed", "registered"),
    [
        (torch.int32, torch.float32),
        (torch.float32, torch.int64),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.bool, torch.bfloat16),
        (torch.float32, torch.float8_e8m0fnu),
    ],
    ids=str,
)
async def test_what_is_no_rounding_is_refused_even_then(
    pushed: torch.dtype, registered: torch.dtype
) -> None:
    good, bad = Guarded(3, dtype=torch.bfloat16), Guarded(3, dtype=registered)
    async with open_job(2) as job:
        generator = await job.join_one({"good": good.tensor, "bad": bad.tensor})
        source = {"good": torch.ones(3), "bad": torch.ones(3).to(pushed)}
        outcomes = await job.outcomes(source, cast=True)
        untouched = good.untouched and bad.untouched
        versions = (generator.version, generator.pending)
        last = {"good": torch.ones(3), "bad": torch.ones(3).to(registered)}
        await job.deliver(generator, last, cast=True)

    names = ["'bad'", str(pushed)[6:], str(registered)[6:]]
    assert [weightsync.DtypeError] * 2 == [type(error) for error in outcomes]
    assert all(name in str(error) for error in outcomes for name in names)
    assert (True, (None, None)) == (untouched, versions)
    assert [1.0, 1.0, 1.0] == good.tensor.tolist()


async def test_without_it_a_difference_is_still_refused_after_a_push_with_it() -> None:
    weight = Guarded(3, dtype=torch.bfloat16)
    async with open_job(2) as job:
        generator = await job.join_one({"w": weight.tensor})
        await job.deliver(generator, {"w": torch.ones(3)}, cast=True)
        outcomes = await job.outcomes({"w": torch.full((3,), 2.0)})
        version = generator.version, generator.pending

    assert [weightsync.DtypeError] * 2 == [type(error) for error in outcomes]
    assert (1, None) == version
    assert [1.0, 1.0, 1.0] == weight.tensor.tolist()


async def test_trainer_ranks_must_agree_on_it() -> None:
    weight = Guarded(3, dtype=torch.bfloat16)
    async with open_job(2) as job:
        await job.join_one({"w": weight.tensor})
        first, second = job.trainers
        source = {"w": torch.ones(3)}
        outcomes = await together(
            lambda: first.push(source, cast=True, timeout=SECONDS),
            lambda: second.push(source, timeout=SECONDS),
        )

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    wanted = "cast is True on rank 0 and False on rank 1"
    assert all(wanted in str(error) for error in outcomes)
    assert weight.untouched


# What is given up


async def push_for(
    trainer: weightsync.Trainer, source: Tensor, version: int, seconds: float
) -> None:
    with anyio.move_on_after(seconds), suppress(weightsync.ClosedError):
        await trainer.push({"w": source}, version=version, cast=True)


async def receive_all(
    generator: weightsync.Generator, weight: Tensor, into: list[tuple[int, float]]
) -> None:
    """Note each version with the one value of all elements, or with a NaN."""
    async for update in generator:
        uniform = bool((weight == weight[0]).all())
        into.append((update.version, float(weight[0]) if uniform else math.nan))


async def until_received(received: list[tuple[int, float]], version: int) -> None:
    with anyio.fail_after(SECONDS):
        while not received or received[-1][0] < version:
            await anyio.sleep(0.001)


@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
async def test_a_cancelled_push_that_converts_leaves_whole_versions_only(
    who: list[int],
) -> None:
    source = torch.zeros(12_000_000)
    weight = torch.zeros(12_000_000, dtype=torch.bfloat16)
    received: list[tuple[int, float]] = []
    version = 0
    async with open_job(2) as job, anyio.create_task_group() as tasks:
        generator = await job.join_one({"w": weight})
        tasks.start_soon(receive_all, generator, weight, received)
        for seconds in [0, 0.001, 0.003, 0.006, 0.01, 0.015, 0.02]:
            for limit in (seconds, SECONDS):
                version += 1
                source.fill_(version)
                async with anyio.create_task_group() as pushes:
                    for rank, trainer in enumerate(job.trainers):
                        mine = limit if rank in who else SECONDS
                        pushes.start_soon(push_for, trainer, source, version, mine)
            await until_received(received, version)
        tasks.cancel_scope.cancel()

    versions = [number for number, _ in received]
    assert [(number, number) for number in versions] == received
    assert sorted(set(versions)) == versions
    assert version == versions[-1]


async def test_a_push_that_converts_and_runs_out_of_time_can_be_made_again() -> None:
    source = torch.ones(30_000_000)
    weight = torch.zeros(30_000_000, dtype=torch.bfloat16)
    async with open_job(2) as job:
        generator = await job.join_one({"w": weight})
        await job.deliver(generator, {"w": source}, cast=True)
        outcomes = await job.outcomes({"w": source}, cast=True, timeout=0.004)
        source.fill_(2)
        await job.push({"w": source}, cast=True, version=9)
        await until_pending(generator, 9)
        update = await generator.receive(timeout=SECONDS)

    assert [weightsync.TimedOutError] * 2 == [type(error) for error in outcomes]
    assert 9 == update.version
    assert bool((weight == 2).all())
