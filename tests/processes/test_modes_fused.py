"""Fused, strided and tied destinations, in every mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import weightsync
from tests.processes.rig import MODES, SECONDS, Mode, open_job, raw, receive_all
from weightsync.names import Slice, fuse, rename, shared, stack, take

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.processes.rig import Job
    from weightsync.names import Rule

pytestmark = pytest.mark.anyio

State = dict[str, Any]

QKV = [
    fuse(
        "qkv",
        [
            take("q", Slice(0, size=8)),
            take("k", Slice(0, size=2)),
            take("v", Slice(0, size=2)),
        ],
    )
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def counted(*shape: int, start: float = 0.0) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(
        shape
    ) + torch.tensor(start)


def sentinel(*shape: int) -> Tensor:
    return torch.full(shape, -777.0)


def attention(version: float) -> dict[str, Tensor]:
    return {
        "q": counted(8, 4, start=1000 * version),
        "k": counted(2, 4, start=1000 * version + 100),
        "v": counted(2, 4, start=1000 * version + 200),
    }


def rows(tensors: dict[str, Tensor]) -> list[list[float]]:
    return torch.cat([tensors[name] for name in ("q", "k", "v")]).tolist()


async def join(
    job: Job, *ranks: State, mode: Mode, names: Sequence[Rule] = ()
) -> list[weightsync.Generator]:
    """One replica, with rules."""
    generators = [
        await job.enter(
            weightsync.Generator(
                *(job.address, ranks[rank]),
                replica="gen-0",
                rank=rank,
                world_size=len(ranks),
                mode=mode,
                names=names,
                timeout=SECONDS,
            )
        )
        for rank in range(len(ranks))
    ]
    for trainer in job.trainers:
        await trainer.wait_for_replicas(1, timeout=SECONDS)
    return generators


@pytest.mark.parametrize("mode", MODES)
async def test_views_of_one_fused_tensor_are_filled_where_they_are(mode: Mode) -> None:
    fused = sentinel(12, 4)
    storage, found = fused.untyped_storage()._cdata, []
    views = {"q": fused[:8], "k": fused[8:10], "v": fused[10:]}
    async with open_job(2) as job:
        generators = await join(job, views, mode=mode)
        for version in (1, 2, 3):
            await job.deliver(generators, attention(version))
            found.append(fused.tolist())

    assert [rows(attention(version)) for version in (1, 2, 3)] == found
    assert (
        storage == fused.untyped_storage()._cdata == views["k"].untyped_storage()._cdata
    )


@pytest.mark.parametrize("mode", MODES)
async def test_rules_fill_a_fused_tensor(mode: Mode) -> None:
    fused, found = nn.Parameter(sentinel(12, 4)), []
    async with open_job() as job:
        generators = await join(job, {"qkv": fused}, mode=mode, names=QKV)
        for version in (1, 2, 3):
            await job.deliver(generators, attention(version))
            with generators[0].use() as weights:
                found.append(weights.tensors["qkv"].tolist())

    assert [rows(attention(version)) for version in (1, 2, 3)] == found
    assert weights.tensors["qkv"] is fused


@pytest.mark.parametrize("mode", MODES)
async def test_a_partial_push_changes_its_part_of_a_fused_tensor_only(
    mode: Mode,
) -> None:
    fused, found, expected = sentinel(12, 4), [], []
    now = attention(1)
    async with open_job() as job:
        generators = await join(job, {"qkv": fused}, mode=mode, names=QKV)
        await job.deliver(generators, now)
        for version, names in ((2, "k"), (3, "qv"), (4, "v"), (5, "k")):
            part = {name: attention(version)[name] for name in names}
            await job.deliver(generators, part, partial=True)
            now = {**now, **part}
            expected.append(rows(now))
            found.append(fused.tolist())

    assert expected == found


@pytest.mark.parametrize("mode", MODES)
async def test_ranks_have_their_slices_of_both_halves(mode: Mode) -> None:
    gate, up = counted(4, 2), counted(4, 2, start=100)
    ranks = [sentinel(4, 2) for _ in range(2)]
    states = [
        {
            "gate": weightsync.Shard(
                held[:2], global_shape=(4, 2), offsets=(2 * rank, 0)
            ),
            "up": weightsync.Shard(
                held[2:], global_shape=(4, 2), offsets=(2 * rank, 0)
            ),
        }
        for rank, held in enumerate(ranks)
    ]
    async with open_job() as job:
        generators = await join(job, *states, mode=mode)
        await job.deliver(generators, {"gate": gate, "up": up})

    assert [
        [[0, 1], [2, 3], [100, 101], [102, 103]],
        [[4, 5], [6, 7], [104, 105], [106, 107]],
    ] == [held.tolist() for held in ranks]


@pytest.mark.parametrize("mode", MODES)
async def test_strided_fused_and_tied_destinations_share_a_job(mode: Mode) -> None:
    columns = sentinel(4, 6)
    embed, experts = sentinel(3, 5), sentinel(2, 4, 3)
    state = {
        "left": columns[:, :2],
        "right": columns[:, 2:],
        "turned": sentinel(4, 3).t(),
        "embed": embed,
        "head": embed,
        "also": embed.view(3, 5),
        "experts": experts,
        "empty": sentinel(0, 3),
        "scalar": torch.tensor(-77, dtype=torch.int8),
    }
    rules = [
        shared(rename("also", "embed")),
        stack("experts", take("{e}.w"), over="e"),
    ]
    found = []
    async with open_job(2) as job:
        generators = await join(job, state, mode=mode, names=rules)
        for version in (1.0, 2.0, 3.0):
            pushed = {
                "left": counted(4, 2, start=version),
                "right": counted(4, 4, start=version + 50),
                "turned": counted(3, 4, start=version + 100),
                "embed": counted(3, 5, start=version + 150),
                "0.w": counted(4, 3, start=version + 200),
                "1.w": counted(4, 3, start=version + 250),
                "empty": torch.zeros(0, 3),
                "scalar": torch.tensor(int(version), dtype=torch.int8),
            }
            pushed["head"] = pushed["embed"]
            await job.deliver(generators, pushed)
            expected = {
                **{name: pushed[name] for name in state if name in pushed},
                "also": pushed["embed"],
                "experts": torch.stack([pushed["0.w"], pushed["1.w"]]),
            }
            found.append({n: raw(state[n]) == raw(t) for n, t in expected.items()})

    assert [dict.fromkeys(state, True)] * 3 == [
        {name: held[name] for name in state} for held in found
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_partial_pushes_keep_strided_neighbours(mode: Mode) -> None:
    columns = sentinel(4, 6)
    views = {"left": columns[:, ::2], "right": columns[:, 1::2]}
    async with open_job() as job:
        generators = await join(job, views, mode=mode)
        await job.deliver(
            generators, {"left": counted(4, 3), "right": counted(4, 3, start=50)}
        )
        for start in (100, 200, 300):
            pushed = {"right": counted(4, 3, start=start)}
            await job.deliver(generators, pushed, partial=True)

    assert counted(4, 3).tolist() == columns[:, ::2].tolist()
    assert counted(4, 3, start=300).tolist() == columns[:, 1::2].tolist()


@pytest.mark.parametrize("mode", MODES)
async def test_a_tied_part_of_a_fused_tensor_comes_by_either_name(mode: Mode) -> None:
    memory = sentinel(4, 2)
    state = {"w": memory, "half": memory[:2]}
    parts = [take("first", Slice(0, size=2)), take("second", Slice(0, size=2))]
    rules = [fuse("w", parts), shared(rename("half", "first"))]
    async with open_job() as job:
        generators = await join(job, state, mode=mode, names=rules)
        both = {"first": counted(2, 2), "second": counted(2, 2, start=10)}
        await job.deliver(generators, both)
        await job.deliver(generators, {"first": counted(2, 2, start=5)}, partial=True)

    assert [[5, 6], [7, 8], [10, 11], [12, 13]] == memory.tolist()


@pytest.mark.parametrize("mode", MODES)
async def test_both_storages_of_one_memory_see_each_version(mode: Mode) -> None:
    array = sentinel(6).numpy()
    state = {"a": torch.from_numpy(array), "b": torch.from_numpy(array)}
    async with open_job() as job:
        generators = await join(job, state, mode=mode)
        for start in (1.0, 2.0):
            weight = counted(6, start=start)
            await job.deliver(generators, {"a": weight, "b": weight})

    assert [counted(6, start=2).tolist()] * 2 == [t.tolist() for t in state.values()]


async def test_received_versions_are_the_same_on_all_ranks_with_rules() -> None:
    ranks = [sentinel(6, 4) for _ in range(2)]
    rules = [
        fuse(
            "qkv",
            [
                take("q", Slice(0, rank, 2, size=8)),
                take("k", Slice(0, rank, 2, size=2)),
                take("v", Slice(0, rank, 2, size=2)),
            ],
        )
        for rank in range(2)
    ]
    async with open_job() as job:
        generators = [
            await job.enter(
                weightsync.Generator(
                    *(job.address, {"qkv": ranks[rank]}),
                    replica="gen-0",
                    rank=rank,
                    world_size=2,
                    names=[rules[rank]],
                    timeout=SECONDS,
                )
            )
            for rank in range(2)
        ]
        await job.trainers[0].wait_for_replicas(1, timeout=SECONDS)
        await job.push(attention(1))
        updates = await receive_all(generators)

    whole = attention(1)
    expected = [
        rows({name: tensor.chunk(2)[rank] for name, tensor in whole.items()})
        for rank in range(2)
    ]
    assert [1, 1] == [update.version for update in updates]
    assert expected == [held.tolist() for held in ranks]
