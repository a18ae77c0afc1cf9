"""State dicts of real modules: DTensors, plain tensors and scalars in one push."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import weightsync
from tests.processes.meshes import device_type
from tests.processes.rig import SECONDS, raw

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

ROPE = 0.018798828125


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].num_batches_tracked.fill_(7)
    model[1].running_mean.copy_(torch.tensor([1.5, -2.5]))
    return model


def sharded(rank: int, port: int) -> nn.Module:
    """Shard the first two layers over two ranks; the last stays plain."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh(device_type(), (2,))
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    return model


async def _trainer(control: Control, address: str, rank: int, port: int) -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    model = sharded(rank, port)
    state_dict = model.state_dict()
    kinds = [isinstance(value, DTensor) for value in state_dict.values()]
    errors = []
    # Rank and world size are those of torch.distributed.
    async with weightsync.Trainer(address, timeout=SECONDS) as transport:
        place = (transport.rank, transport.world_size)
        await transport.wait_for_replicas(1)
        await transport.push(state_dict)
        for extra in ({"extra_state": b"x"}, {"none": None}):
            try:
                await transport.push({**state_dict, **extra})
            except TypeError as error:
                errors.append(str(error))
        report = await transport.push(
            {**state_dict, "extra_state": b"x"}, ignore=["extra_state"]
        )
        await control.ahear()
    dist.destroy_process_group()
    return [place, kinds, errors, report.nbytes]


async def _generator(control: Control, address: str) -> list[Any]:
    model = build()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(-77)
    rope = torch.full((4,), ROPE, dtype=torch.bfloat16)
    model.register_buffer("rope", rope, persistent=False)
    versions = []
    async with weightsync.Generator(
        address, model.state_dict(), replica="gen-0", timeout=SECONDS
    ) as transport:
        async for update in transport:
            versions.append(update.version)
            if len(versions) == 2:
                break
    found = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    shape = tuple(model[1].num_batches_tracked.shape)
    return [found, shape, (model.rope == ROPE).all().item(), versions]


def test_a_module_of_sharded_plain_and_scalar_entries_arrives_exactly(
    processes: Processes, address: str
) -> None:
    from tests.processes.harness import free_address

    port = int(free_address().rpartition(":")[2])
    generator = processes.start(_generator, address)
    trainers = [processes.start(_trainer, address, rank, port) for rank in range(2)]
    found, shape, rope, versions = generator.result(50)
    for trainer in trainers:
        trainer.say("end")
    results = [trainer.result() for trainer in trainers]

    expected = {name: raw(tensor) for name, tensor in build().state_dict().items()}
    assert expected == found
    assert ((), True, [1, 2]) == (shape, rope, versions)
    assert [(0, 2), (1, 2)] == [place for place, *_ in results]
    assert [True] * 4 + [False] * 5 == results[0][1]
    assert results[0][2] == results[1][2]
    assert ["extra_state" in error for error in results[0][2]] == [True, False]
    assert "'none'" in results[0][2][1]
    assert sum(len(data) for data in expected.values()) == results[0][3]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_scalars_stay_scalars_and_empty_tensors_stay_empty() -> None:
    from tests.processes.rig import open_job

    weights = {
        "scalar": torch.tensor(-777.0),
        "empty": torch.zeros(0, 4),
        "normal": torch.full((3,), -777.0),
        "also empty": torch.zeros(2, 0),
    }
    pushed = {
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(3.5),
        "also empty": torch.ones(2, 0),
        "normal": torch.ones(3),
    }
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, pushed)
        (update,) = await job.deliver(
            generator, {"empty": torch.ones(0, 4)}, partial=True
        )

    assert {n: t.tolist() for n, t in pushed.items()} == {
        n: t.tolist() for n, t in weights.items()
    }
    assert (2, 0) == (update.version, update.nbytes)
