"""What readers of several replicas see of the versions that several trainers push."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import pytest
import torch

import weightsync
from tests.processes.engines import slow_on_nccl
from tests.processes.rig import SECONDS

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Control, Processes
    from tests.processes.rig import Mode

TRAINERS = 2
REPLICAS: tuple[tuple[str, int, Mode], ...] = (
    ("solo", 1, "staged"),
    ("pair", 2, "swap"),
    ("place", 2, "inplace"),
)
LOOKS = 200
MIB = 1 << 20


class Rounds(NamedTuple):
    """What all push and receive: tensors of so many float32, all the version."""

    tensors: int
    size: int
    pushes: int
    late: float = 0.0
    hold: float = 0.0
    looks: int = 0
    device: str = "cpu"

    def weights(self, value: float) -> dict[str, torch.Tensor]:
        """Whole tensors."""
        return {
            f"layer.{index}": torch.full((self.size,), float(value)).to(self.device)
            for index in range(self.tensors)
        }


class Look(NamedTuple):
    """The version that a reader was told, and the least and the largest element."""

    version: int
    low: float
    high: float


class Seen(NamedTuple):
    """What one rank saw, when it had the last version, and the memory for puts."""

    looks: list[Look]
    last: float
    memory_mib: float


def _half(rank: int, rounds: Rounds) -> dict[str, weightsync.Shard]:
    """What a trainer rank has of all tensors."""
    start, end = (rounds.size * part // TRAINERS for part in (rank, rank + 1))
    return {
        name: weightsync.Shard(
            tensor[start:end], global_shape=(rounds.size,), offsets=(start,)
        )
        for name, tensor in rounds.weights(0).items()
    }


def _fill(shards: dict[str, weightsync.Shard], value: float) -> None:
    for shard in shards.values():
        shard.tensor.copy_(torch.full(shard.tensor.shape, float(value)))


async def _refused(
    transport: weightsync.Trainer, rank: int, rounds: Rounds
) -> str | None:
    """Push what does not fit: one tensor in the middle, on rank 1; return the error."""
    shards = _half(rank, rounds)
    _fill(shards, -2)
    name = f"layer.{rounds.tensors * 5 // 8}"
    if rank == 1:
        shards[name] = weightsync.Shard(
            shards[name].tensor[:-1],
            global_shape=(rounds.size - 1,),
            offsets=shards[name].offsets,
        )
    try:
        await transport.push(shards, require="all")
    except weightsync.PlanError as error:
        return f"{name} is named: {name in str(error)}"
    return None


async def _push(
    control: Control, address: str, rank: int, rounds: Rounds
) -> tuple[float, str | None]:
    """Push all versions, each over what was left of the one before, and a wrong one.

    Return when the last version was pushed, and how the wrong one was refused.
    """
    shards = _half(rank, rounds)
    async with weightsync.Trainer(
        address, rank=rank, world_size=TRAINERS, timeout=SECONDS
    ) as transport:
        await transport.wait_for_replicas(len(REPLICAS))
        for version in range(1, rounds.pushes + 1):
            _fill(shards, version)
            if rank == 1 and version in {2, 5, 9}:
                await anyio.sleep(rounds.late)
            report = await transport.push(shards, version=version, require="all")
            assert len(REPLICAS) == len(report.delivered)
            _fill(shards, -1)
        ended = time.monotonic()
        await control.ahear()
        refused = await _refused(transport, rank, rounds)
        control.say("refused")
        await control.ahear()
    return ended, refused


async def _read(
    control: Control, address: str, place: tuple[str, int, int, Mode], rounds: Rounds
) -> Seen:
    """Receive all versions; look at each, and again and again in between."""
    name, rank, size, mode = place
    looks: list[Look] = []
    done = False

    async def look() -> None:
        async with transport.use() as held:
            await anyio.sleep(rounds.hold)
            bounds = [tensor.cpu().aminmax() for tensor in held.tensors.values()]
            low = min(low.item() for low, _ in bounds)
            high = max(high.item() for _, high in bounds)
            looks.append(Look(held.version or 0, low, high))

    async def read() -> None:
        while not done or len(looks) < rounds.looks:
            await look()
            await anyio.sleep(0.001)

    async with weightsync.Generator(
        address,
        rounds.weights(0),
        replica=name,
        rank=rank,
        world_size=size,
        mode=mode,
        timeout=SECONDS,
    ) as transport:
        async with anyio.create_task_group() as group:
            if rounds.looks and mode != "inplace":
                group.start_soon(read)
            for _ in range(rounds.pushes):
                await transport.receive()
                await look()
            last, done = time.monotonic(), True
        memory = _memory_mib(rounds.device)
        control.say("done")
        await control.ahear()
        await look()
    return Seen(looks, last, memory)


def _memory_mib(device: str) -> float:
    """Size of the anonymous files that this process holds: its window, mostly.

    On a GPU what is not torch's.
    """
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / MIB
    found: dict[int, int] = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that listed them
            if str(path.readlink()).startswith("/memfd:weightsync"):
                status = path.stat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values()) / MIB


def _run(
    processes: Processes, address: str, rounds: Rounds
) -> tuple[float, dict[str, list[Seen]]]:
    """Let all push and read; return when the last push ended, and what was seen."""
    rounds = rounds._replace(device=processes.device)
    trainers = [
        processes.start(_push, address, rank, rounds) for rank in range(TRAINERS)
    ]
    readers: dict[str, list[Child]] = {
        name: [
            processes.start(_read, address, (name, rank, ranks, mode), rounds)
            for rank in range(ranks)
        ]
        for name, ranks, mode in REPLICAS
    }
    everyone = [reader for ranks in readers.values() for reader in ranks]
    for reader in everyone:
        assert "done" == reader.hear(100)
    for trainer in trainers:
        trainer.say("push what does not fit")
    assert ["refused"] * TRAINERS == [trainer.hear() for trainer in trainers]
    for child in (*everyone, *trainers):
        child.say("end")
    seen = {name: [r.result() for r in ranks] for name, ranks in readers.items()}
    pushed = [trainer.result() for trainer in trainers]
    wrong = f"layer.{rounds.tensors * 5 // 8} is named: True"

    assert [wrong] * TRAINERS == [refused for _, refused in pushed]
    return max(ended for ended, _ in pushed), seen


def _check(seen: dict[str, list[Seen]], pushes: int) -> None:
    """Every look is at one whole version, and they are all of them, in order."""
    looks = {
        (name, rank): found.looks
        for name, ranks in seen.items()
        for rank, found in enumerate(ranks)
    }
    mixed = [
        (who, look)
        for who, found in looks.items()
        for look in found
        if not look.version == look.low == look.high
    ]
    versions = {who: [look.version for look in found] for who, found in looks.items()}

    assert [] == mixed
    assert {who: sorted(found) for who, found in versions.items()} == versions
    every = set(range(1, pushes + 1))
    assert dict.fromkeys(versions, every) == {
        who: set(found) - {0} for who, found in versions.items()
    }


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("late", [0.2, pytest.param(2.0, marks=pytest.mark.slow)])
def test_every_round_waits_for_all_trainer_ranks_on_all_replicas(
    processes: Processes, address: str, late: float
) -> None:
    _, seen = _run(processes, address, Rounds(3, 1000, 10, late=late))

    _check(seen, 10)


@slow_on_nccl
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("pushes", "hold"), [(20, 0.02), pytest.param(200, 0.05, marks=pytest.mark.slow)]
)
def test_readers_slower_than_the_trainers_hold_them_back_and_see_every_version(
    engine: Engine, processes: Processes, address: str, pushes: int, hold: float
) -> None:
    ended, seen = _run(processes, address, Rounds(1, 2 * MIB, pushes, hold=hold))

    _check(seen, pushes)
    everyone = [found for ranks in seen.values() for found in ranks]
    assert max(found.last for found in everyone) - ended <= 5.0
    memory = {
        name: {found.memory_mib // 8 for found in ranks} for name, ranks in seen.items()
    }
    assert {"solo": {1}, "pair": {2}, "place": {1}} == memory  # models of 8 MiB


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "pushes", [10, pytest.param(30, marks=pytest.mark.slow)], ids=str
)
def test_every_snapshot_of_every_replica_is_one_whole_version(
    processes: Processes, address: str, pushes: int
) -> None:
    _, seen = _run(processes, address, Rounds(64, 65_536, pushes, looks=LOOKS))

    _check(seen, pushes)
    watched = [found for name in ("solo", "pair") for found in seen[name]]
    assert all(len(found.looks) >= LOOKS for found in watched)
