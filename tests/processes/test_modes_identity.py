"""What stays the same about the registered tensors, and what the modes change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weightsync
from tests.processes.rig import MODES, Guarded, Mode, open_job

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine(nn.Module):
    """A module with a parameter, a buffer, and a tensor made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), -777.0))
        self.register_buffer("shift", torch.full((2,), -777.0))
        with torch.inference_mode():
            self.scale = torch.full((2,), -777.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return (x @ self.weight.t() + self.shift) * self.scale

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "shift": self.shift, "scale": self.scale}


def identity(tensor: Tensor) -> tuple[Any, ...]:
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_inference()
    return (*flags, tensor.grad_fn, tensor.stride(), id(tensor))


@pytest.mark.parametrize("mode", MODES)
async def test_a_module_computes_with_each_version_without_rebinding(
    mode: Mode,
) -> None:
    engine = Engine()
    before = {name: identity(tensor) for name, tensor in engine.tensors.items()}
    computed = []
    async with open_job() as job:
        generator = await job.join_one(engine.tensors, mode=mode)
        for version in (1.0, 2.0, 3.0):
            pushed = {
                "weight": torch.full((2, 3), version),
                "shift": torch.full((2,), version),
                "scale": torch.full((2,), version),
            }
            await job.deliver(generator, pushed)
            computed.append(engine(torch.ones(3)).tolist())
        after = {name: identity(tensor) for name, tensor in engine.tensors.items()}

    assert [[4.0 * v * v] * 2 for v in (1.0, 2.0, 3.0)] == computed
    assert before == after


async def test_staged_never_moves_the_tensors() -> None:
    engine = Engine()
    before = [tensor.data_ptr() for tensor in engine.tensors.values()]
    async with open_job() as job:
        generator = await job.join_one(engine.tensors)
        pushed = {name: torch.zeros_like(t) for name, t in engine.tensors.items()}
        for _ in range(3):
            await job.deliver(generator, pushed)

    assert before == [tensor.data_ptr() for tensor in engine.tensors.values()]


async def test_swap_alternates_between_two_addresses() -> None:
    weight = torch.zeros(3)
    addresses = []
    async with open_job() as job:
        generator = await job.join_one({"w": weight}, mode="swap")
        for version in range(4):
            addresses.append(weight.data_ptr())
            await job.deliver(generator, {"w": torch.full((3,), float(version))})

    first, second, *_ = addresses
    assert [first, second, first, second] == addresses
    assert first != second


async def test_inplace_has_one_address_from_registration_on() -> None:
    weight = torch.zeros(3)
    addresses = set()
    async with open_job() as job:
        generator = await job.join_one({"w": weight}, mode="inplace")
        for version in range(3):
            await job.deliver(generator, {"w": torch.full((3,), float(version))})
            addresses.add(weight.data_ptr())

    assert 1 == len(addresses)


@pytest.mark.parametrize("mode", MODES)
async def test_registration_keeps_the_values(mode: Mode) -> None:
    weights = {
        "w": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool),
    }
    async with open_job() as job:
        await job.join_one(weights, mode=mode)
        found = [weights[name].tolist() for name in ("w", "scalar", "empty")]
        flags = weights["flags"].view(torch.uint8).tolist()

    assert [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 7, []] == found
    assert [0, 1, 2, 255] == flags


@pytest.mark.parametrize("mode", MODES)
async def test_the_tensors_outlive_the_generator(mode: Mode) -> None:
    weight = torch.zeros(1 << 16)
    async with open_job() as job:
        generator = await job.join_one({"w": weight}, mode=mode)
        await job.deliver(generator, {"w": torch.arange(float(1 << 16))})
    del generator, job
    weight += 1

    assert torch.equal(torch.arange(1, 1 + (1 << 16), dtype=torch.float32), weight)


@pytest.mark.parametrize("mode", ["swap", "inplace"])
def test_modes_that_exchange_storage_refuse_small_parts_of_one(mode: Mode) -> None:
    for held in (
        torch.zeros(4, 3)[:, 2:],
        torch.zeros(4, 3)[3:],
        weightsync.Shard(torch.zeros(5, 3)[3:], global_shape=(4, 3), offsets=(2, 0)),
    ):
        with pytest.raises(weightsync.UnsupportedError, match=r"'w'.*staged"):
            weightsync.Generator("tcp://127.0.0.1:1", {"w": held}, mode=mode)


async def test_nothing_is_written_beside_a_destination_while_versions_change() -> None:
    places = {f"w{i}": Guarded(i) for i in range(1, 9)}
    async with open_job(2) as job:
        tensors = {name: place.tensor for name, place in places.items()}
        generator = await job.join_one(tensors)
        for version in range(5):
            pushed = {n: torch.full_like(t, version) for n, t in tensors.items()}
            await job.deliver(generator, pushed)

    assert all(place.intact for place in places.values())
    assert all((place.tensor == 4).all() for place in places.values())


@pytest.mark.parametrize("mode", MODES)
async def test_whoever_shares_a_registered_storage_sees_each_version(
    mode: Mode,
) -> None:
    layer = nn.Linear(3, 2)
    row = layer.weight.detach()[1]
    found = []
    async with open_job() as job:
        generator = await job.join_one(layer.state_dict(), mode=mode)
        for value in (1.0, 2.0, 3.0):
            pushed = {"weight": torch.full((2, 3), value), "bias": torch.zeros(2)}
            await job.deliver(generator, pushed)
            found.append((layer(torch.ones(3)).tolist(), row.tolist()))

    assert [([3 * v] * 2, [v] * 3) for v in (1.0, 2.0, 3.0)] == found


@pytest.mark.parametrize("mode", MODES)
async def test_the_ranks_of_a_replica_hold_shards_in_every_mode(mode: Mode) -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    ranks = [
        {
            "w": weightsync.Shard(
                torch.full((4, 3), -777.0), global_shape=(4, 6), offsets=(0, column)
            )
        }
        for column in (0, 3)
    ]
    async with open_job(2) as job:
        generators = await job.join(*ranks, mode=mode)
        for factor in (1, 2, 3):
            await job.deliver(generators, {"w": weight * factor})

    found = torch.cat([rank["w"].tensor for rank in ranks], dim=1)
    assert (weight * 3).tolist() == found.tolist()
