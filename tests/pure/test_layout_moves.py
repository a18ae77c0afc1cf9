"""What a push of state dicts moves, with shards of every kind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightsync.errors import (
    PlanError,
    UnsupportedError,
)
from weightsync.fit import check
from weightsync.layout import Captured, capture, register
from weightsync.placements import strided_shard
from weightsync.plan import Plan, make_plan, slot_layout
from weightsync.spec import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are equal."""
    return (expected.dtype, expected.shape) == (actual.dtype, actual.shape) and (
        torch.equal(raw(expected.contiguous()), raw(actual.contiguous()))
    )


def moved(
    trainers: Sequence[Captured], destination: Mapping[str, object]
) -> tuple[Plan, dict[str, torch.Tensor]]:
    """Push by copying bytes; return the plan and what the slot then holds by name."""
    manifest = register(destination).manifest
    sides = [captured.manifest for captured in trainers], [manifest]
    check(*sides, replica_name="gen-0")
    plan, layout = make_plan(*sides), slot_layout(manifest)
    slot = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    for trainer, generator in plan.pairs:
        for run in plan.runs(trainer, generator):
            source = raw(trainers[trainer].tensors[run.source])
            size = run.rows, run.row_bytes
            offset = source.storage_offset() + run.source_offset
            there = source.as_strided(size, (run.source_stride, 1), offset)
            slot.as_strided(size, (run.target_stride, 1), run.target_offset)[:] = there
    held = {
        tensor.name: slot[offset : offset + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.box.sizes)
        for tensor, offset in zip(manifest.tensors, layout.offsets, strict=True)
    }
    return plan, held


@contextmanager
def rank_of(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh; nothing is communicated."""
    world = torch.Size(shape).numel()
    # It remembers meshes, which do not tell ranks apart.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        names = tuple(f"dim{dim}" for dim in range(len(shape)))
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def test_mixed_dtypes_at_odd_offsets_arrive_bit_by_bit() -> None:
    def bits(dtype: torch.dtype, carrier: torch.dtype, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(carrier).view(dtype)

    source = {
        "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16),
        "single": torch.tensor([1.5]),
        "bool": torch.tensor([True]),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "bf16": bits(torch.bfloat16, torch.int16, 0x8000, 1, 0x7FC1, 0x7F80),
        "e4m3": bits(torch.float8_e4m3fn, torch.uint8, 0x7F, 0x80, 1),
        "e5m2": bits(torch.float8_e5m2, torch.uint8, 0x7D, 0x80, 1),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "int64": torch.tensor([2**63 - 1]),
        "complex": torch.tensor([complex(float("nan"), -0.0)]),
        "int8": torch.tensor([-128], dtype=torch.int8),
    }
    destination = {name: torch.zeros_like(value) for name, value in source.items()}
    _, held = moved([capture(source)], destination)

    assert [] == [name for name in source if not same(source[name], held[name])]


def test_scalars_and_tensors_without_elements_are_entries_like_others() -> None:
    source = {
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "nil": torch.ones(0),
    }
    captured = capture(source)
    _, held = moved([captured], {k: torch.zeros_like(v) for k, v in source.items()})

    assert [None] * 3 == [tensor.tied for tensor in captured.manifest.tensors]
    assert [] == [name for name in source if not same(source[name], held[name])]


def test_column_slices_of_dtensors_are_put_together() -> None:
    full = torch.arange(12).view(3, 4)
    trainers: list[Captured] = []
    for rank in range(2):
        with rank_of(rank, 2) as mesh:
            local = full[:, 2 * rank : 2 * rank + 2]
            value = DTensor.from_local(local, mesh, [ShardPlacement(1)])
            trainers.append(capture({"w": value}))
    _, held = moved(trainers, {"w": torch.zeros_like(full)})

    assert Box((0, 2), (3, 2)) == trainers[1].manifest.tensors[0].box
    assert same(full, held["w"])


def test_replicated_shards_of_dtensors_are_read_once() -> None:
    trainers: list[Captured] = []
    for rank in range(4):
        with rank_of(rank, 2, 2) as mesh:
            local = torch.arange(4.0).view(4, 1)[2 * (rank % 2) :][:2]
            placements = [Replicate(), ShardPlacement(0)]
            trainers.append(capture({"w": DTensor.from_local(local, mesh, placements)}))
    plan, held = moved(trainers, {"w": torch.zeros(4, 1)})

    assert same(torch.arange(4.0).view(4, 1), held["w"])
    assert 16 == sum(plan.nbytes(*pair) for pair in plan.pairs)


@pytest.mark.parametrize(
    ("rows", "world", "expected"),
    [
        (5, 2, [3, 2]),
        (7, 3, [3, 3, 1]),
        (7, 4, [2, 2, 2, 1]),
        (3, 4, [1, 1, 1, 0]),
    ],
)
def test_uneven_and_empty_shards_have_their_true_boxes(
    rows: int, world: int, expected: list[int]
) -> None:
    full = torch.arange(rows * 2).view(rows, 2)
    trainers: list[Captured] = []
    for rank in range(world):
        with rank_of(rank, world) as mesh:
            local = full[sum(expected[:rank]) :][: expected[rank]]
            value = DTensor.from_local(
                local,
                mesh,
                [ShardPlacement(0)],
                shape=full.shape,
                stride=full.stride(),
            )
            trainers.append(capture({"w": value}))
    _, held = moved(trainers, {"w": torch.zeros_like(full)})

    sizes = [captured.manifest.tensors[0].box.sizes[0] for captured in trainers]
    assert expected == sizes
    assert same(full, held["w"])


def test_pieces_of_unequal_size_without_a_shape_are_refused_with_both_shapes() -> None:
    trainers: list[Captured] = []
    for rank, rows in enumerate((3, 2)):
        with rank_of(rank, 2) as mesh:
            value = DTensor.from_local(torch.ones(rows, 2), mesh, [ShardPlacement(0)])
            trainers.append(capture({"w": value}))
    with pytest.raises(PlanError, match=r"'w'.*\(6, 2\).*\(4, 2\)"):
        moved(trainers, {"w": torch.zeros(5, 2)})


def test_a_local_piece_of_the_wrong_size_is_refused_by_name() -> None:
    with rank_of(0, 2) as mesh:
        value = DTensor.from_local(
            torch.ones(2, 2),
            mesh,
            [ShardPlacement(0)],
            shape=torch.Size((5, 2)),
            stride=(2, 1),
        )
        with pytest.raises(PlanError, match=r"'w'.*\(2, 2\).*\(5, 2\).*\(3, 2\)"):
            capture({"w": value})


def test_partial_placements_and_unfinished_communication_are_refused() -> None:
    local = torch.ones(4, 2)
    with rank_of(0, 2) as mesh:
        pending = AsyncCollectiveTensor(local)
        values = {
            r"P\(sum\)": DTensor.from_local(local, mesh, [Partial()]),
            "AsyncCollectiveTensor": DTensor.from_local(pending, mesh, [Replicate()]),
        }
        for message, value in values.items():
            for take in (capture, register):
                with pytest.raises(UnsupportedError, match=f"'w'.*{message}"):
                    take({"w": value})


@pytest.mark.parametrize("rows", [1, 5, 7, 12])
def test_fsdp_over_tensor_parallel_is_put_together(rows: int) -> None:
    full = torch.arange(rows * 2.0).view(rows, 2)
    trainers: list[Captured] = []
    for rank in range(6):
        with rank_of(rank, 3, 2) as mesh:
            layer = torch.nn.Linear(2, rows, bias=False)
            layer.weight.data.copy_(full)
            model = torch.nn.Sequential(layer)
            plan = {"0": ColwiseParallel()}
            parallelize_module(model, mesh["dim1"], plan, src_data_rank=None)
            fully_shard(model, mesh=mesh["dim0"])
            trainers.append(capture(model.named_parameters()))
    plan, held = moved(trainers, {"0.weight": torch.zeros_like(full)})

    assert same(full, held["0.weight"])
    assert full.nbytes == sum(plan.nbytes(*pair) for pair in plan.pairs)


def test_rows_that_are_apart_are_several_pieces() -> None:
    full = torch.arange(12.0).view(6, 2)
    trainers: list[Captured] = []
    for rank in range(2):
        with rank_of(rank, 2) as mesh:
            placements = [strided_shard(0, split_factor=3)]
            local = full[rank::2].clone()
            value = DTensor.from_local(local, mesh, placements)
            trainers.append(capture({"w": value}))
            assert local.data_ptr() == trainers[-1].tensors[0].data_ptr()
    _, held = moved(trainers, {"w": torch.zeros_like(full)})

    assert ("w", "w", "w") == trainers[1].manifest.names
    assert same(full, held["w"])


def test_an_order_of_cuts_that_placements_do_not_tell_is_refused() -> None:
    with rank_of(1, 2, 2) as mesh:
        placements = [ShardPlacement(0), ShardPlacement(0)]
        value = DTensor.from_local(torch.ones(2, 1), mesh, placements)
        value._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        with pytest.raises(UnsupportedError, match=r"'w'.*with the order"):
            capture({"w": value})


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with rank_of(1, 2):
        mesh = DeviceMesh("cpu", [0], _init_backend=False)
        value = DTensor.from_local(torch.ones(0, 2), mesh, [ShardPlacement(0)])
        captured = capture({"w": value, "v": torch.ones(1)})

    assert ("v",) == captured.manifest.names


def test_dtensors_plain_tensors_and_scalars_mix() -> None:
    norm = torch.nn.BatchNorm1d(2)
    trainers: list[Captured] = []
    full = torch.arange(4.0).view(2, 2)
    for rank in range(2):
        with rank_of(rank, 2) as mesh:
            shard = DTensor.from_local(full[rank : rank + 1], mesh, [ShardPlacement(0)])
            trainers.append(capture({"0.weight": shard, **norm.state_dict()}))
    source = {"0.weight": full, **norm.state_dict()}
    destination = {name: torch.zeros_like(value) for name, value in source.items()}
    _, held = moved(trainers, destination)

    assert () == held["num_batches_tracked"].shape
    assert [] == [name for name in source if not same(source[name], held[name])]


def test_order_never_matters() -> None:
    names = [f"experts.{i}" for i in range(12)]
    experts: dict[str, torch.Tensor] = {
        name: torch.full((2, 2), i, dtype=torch.bfloat16)
        for i, name in enumerate(names)
    }
    experts["router.bias"] = torch.arange(3.0)
    text_order = sorted(experts)
    trainers = [capture(experts), capture({name: experts[name] for name in text_order})]
    destination = {name: torch.zeros_like(experts[name]) for name in reversed(experts)}
    _, held = moved(trainers, destination)

    assert [] == [name for name in experts if not same(experts[name], held[name])]


def test_ranks_that_hold_some_experts_each_are_one_source() -> None:
    experts = {f"experts.{i}": torch.full((2, 2), float(i)) for i in range(12)}
    items = list(experts.items())
    trainers = [capture(dict(items[:6])), capture(dict(items[6:]))]
    _, held = moved(trainers, {k: torch.zeros(2, 2) for k in reversed(experts)})

    assert [] == [name for name in experts if not same(experts[name], held[name])]


def test_a_dtensor_is_registered_as_its_local_memory() -> None:
    with rank_of(1, 2) as mesh:
        local = torch.zeros(3, 2)
        value = DTensor.from_local(local, mesh, [ShardPlacement(1)])
        registered = register({"w": torch.nn.Parameter(value)})

    assert Box((0, 2), (3, 2)) == registered.manifest.tensors[0].box
    assert local.data_ptr() == registered.tensors[0].data_ptr()
