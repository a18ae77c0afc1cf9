"""Generator ranks hold DTensors of their own mesh, and pieces inside larger buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import weightsync
import weightsync.blocking
from tests.processes.meshes import (
    Team,
    World,
    as_lists,
    counted,
    delivered,
    filled,
    fsdp,
    local_of,
)
from tests.processes.rig import FILL, SECONDS, open_job
from weightsync import Shard

if TYPE_CHECKING:
    from tests.processes.harness import Processes
    from tests.processes.meshes import Member, Rank
    from tests.processes.rig import Mode

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TwoLayers(nn.Module):
    """A layer to cut by columns and one to cut by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 4)
        self.register_buffer("scale", counted(6))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(counted(*parameter.shape))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(hidden))
        return found


def _trainer(rank: Rank, width: int) -> None:
    model = fsdp(TwoLayers(width), rank.mesh(rank.world))
    for _ in range(2):
        rank.push(model.state_dict())
        with torch.no_grad():
            for tensor in model.state_dict().values():
                local_of(tensor).add_(1000)


def _engine(
    member: Member, address: str, width: int, mode: Mode
) -> list[dict[str, list[Any]]]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = TwoLayers(width)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, member.mesh(member.world), plan)
    state_dict = model.state_dict()
    found = []
    with weightsync.blocking.Generator(
        address, state_dict, replica="engine", mode=mode, timeout=SECONDS
    ) as transport:
        for _ in range(2):
            transport.receive()
            held = {name: local_of(state_dict[name]) for name in state_dict}
            found.append(as_lists(held))
    return found


@pytest.mark.parametrize("mode", ["staged", "swap", "inplace"])
async def test_a_tensor_parallel_engine_receives_into_its_dtensors(
    processes: Processes, address: str, mode: Mode
) -> None:
    width = 5  # Torch leaves padding behind an uneven shard.
    team = Team(processes, address, 2, _trainer, width)
    engine = World(processes, 2, _engine, address, width, mode, name="engine")
    first, second = engine.results()
    team.results()

    full = TwoLayers(width).state_dict()
    for number, found in enumerate(zip(first, second, strict=True)):
        wanted = {name: tensor + 1000 * number for name, tensor in full.items()}
        for rank, held in enumerate(found):
            cut = {name: wanted[name] for name in ("scale", "down.bias")}
            for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
                cut[name] = wanted[name].chunk(2, dim)[rank]
            assert as_lists(cut) == held


def _fsdp_source(rank: Rank) -> int:
    model = nn.Linear(6, 8)
    with torch.no_grad():
        model.weight.copy_(counted(8, 6))
        model.bias.copy_(counted(8))
    state_dict = fsdp(model, rank.mesh(rank.world)).state_dict()
    return rank.push(state_dict, replicas=2).nbytes


def window(rows: slice, columns: slice, step: int = 1) -> tuple[torch.Tensor, Shard]:
    """A part of (8, 6) in the middle of a larger buffer, every ``step`` columns."""
    shape = torch.empty(8, 6, device="meta")[rows, columns].shape
    place = torch.full((shape[0] + 4, step * shape[1] + 8), -777.0)
    inside = place[2:-2, 4 : 4 + step * shape[1] : step]
    offsets = rows.start, columns.start
    return place, Shard(inside, global_shape=(8, 6), offsets=offsets)


async def test_sharded_trainers_fill_strided_pieces_inside_larger_buffers(
    processes: Processes, address: str
) -> None:
    cuts = [
        [(slice(0, 8), slice(0, 4)), (slice(0, 8), slice(4, 6))],
        [(slice(0, 3), slice(0, 6)), (slice(3, 8), slice(0, 6))],
    ]
    windows = [
        [window(*cut, step=step) for cut in replica]
        for step, replica in enumerate(cuts, 1)
    ]
    biases = [[filled(3, 8) for _ in replica] for replica in cuts]
    layouts = [
        [
            {"weight": shard, "bias": bias[1]}
            for (_, shard), bias in zip(replica, rows, strict=True)
        ]
        for replica, rows in zip(windows, biases, strict=True)
    ]
    team = Team(processes, address, 3, _fsdp_source)
    await delivered(team, *layouts)
    moved = sum(shard.tensor.nbytes for replica in windows for _, shard in replica)

    assert [moved + 4 * 32] * 3 == team.results()
    for replica, pieces, rows in zip(cuts, windows, biases, strict=True):
        for cut, (place, shard), bias in zip(replica, pieces, rows, strict=True):
            assert counted(8, 6)[cut].tolist() == shard.tensor.tolist()
            shard.tensor.fill_(-777)
            assert [-777.0] == place.unique().tolist()
            assert [[-777.0] * 8, list(range(8)), [-777.0] * 8] == bias.tolist()


@pytest.mark.parametrize("mode", ["staged", "swap", "inplace"])
async def test_columns_of_one_buffer_are_filled_in_every_mode(mode: Mode) -> None:
    left, right = counted(4, 3), counted(4, 2) + 100
    buffer = filled(4, 5)
    held = [
        {
            "left": Shard(left[rows], global_shape=(4, 3), offsets=(rows.start, 0)),
            "right": Shard(right[rows], global_shape=(4, 2), offsets=(rows.start, 0)),
        }
        for rows in (slice(0, 1), slice(1, 4))
    ]
    async with open_job(2) as job:
        generator = await job.join_one(
            {"right": buffer[:, 3:], "left": buffer[:, :3]}, mode=mode
        )
        found = []
        for _ in range(3):
            await job.deliver(generator, *held)
            found.append(buffer.tolist())
            for tensor in (left, right):
                tensor.add_(1000)

    first = torch.cat([counted(4, 3), counted(4, 2) + 100], 1)
    assert [(first + 1000 * number).tolist() for number in range(3)] == found


async def test_one_piece_may_be_wanted_twice_by_one_rank() -> None:
    places = torch.full((2, 3 + 64), FILL, dtype=torch.uint8)
    async with open_job(2) as job:
        rules = [weightsync.names.rename(name, "w") for name in ("first", "second")]
        shared = [weightsync.names.shared(rule) for rule in rules]
        generator = await job.enter(
            weightsync.Generator(
                job.address,
                {"first": places[0, 32:35], "second": places[1, 32:35]},
                replica="gen-0",
                rank=0,
                world_size=1,
                names=shared,
                timeout=SECONDS,
            )
        )
        for trainer in job.trainers:
            await trainer.wait_for_replicas(1)
        await job.deliver(generator, {"w": torch.tensor([1, 2, 3], dtype=torch.uint8)})

    expected = torch.full((2, 3 + 64), FILL, dtype=torch.uint8)
    expected[:, 32:35] = torch.tensor([1, 2, 3])
    assert expected.tolist() == places.tolist()
