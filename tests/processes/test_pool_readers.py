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
from tests.processes.rig import SECONDS

if TYPE_CHECKING:
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

    def weights(self, value: float) -> dict[str, torch.Tensor]:
        """Whole tensors."""
        return {
            f"layer.{index}": torch.full((self.size,), float(value))
            for index in range(self.tensors)
        }


class Look(NamedTuple):
    """The version that a reader was told, and the least and the largest element."""

    version: int
    low: float
    high: float


class Seen(NamedTuple):
    """What one rank saw, when it had the last version, and its shared memory."""

    looks: list[Look]
    last: float
    shared_mib: float


async def _push(control: Control, address: str, rank: int, rounds: Rounds) -> float:
    """Push all versions, each over what was left of the one before."""
    whole = rounds.weights(0)
    half = slice(*((0, rounds.size // 2), (rounds.size // 2, rounds.size))[rank])
    shards = {
        name: weightsync.Shard(
            tensor[half], global_shape=(rounds.size,), offsets=(half.start,)
        )
        for name, tensor in whole.items()
    }
    async with weightsync.Trainer(
        address, rank=rank, world_size=TRAINERS, timeout=SECONDS
    ) as transport:
        await transport.wait_for_replicas(len(REPLICAS))
        for version in range(1, rounds.pushes + 1):
            for shard in shards.values():
                shard.tensor.fill_(version)
            if rank == 1 and version in {2, 5, 9}:
                await anyio.sleep(rounds.late)
            report = await transport.push(shards, version=version, require="all")
            assert len(REPLICAS) == len(report.delivered)
            for shard in shards.values():
                shard.tensor.fill_(-1)
        ended = time.monotonic()
        await control.ahear()
    return ended


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
            bounds = [tensor.aminmax() for tensor in held.tensors.values()]
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
        shared = _shared_mib()
        control.say("done")
        await control.ahear()
    return Seen(looks, last, shared)


def _shared_mib() -> float:
    """Size of the anonymous files that this process holds: its window, mostly."""
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
        assert "done" == reader.hear(50)
    for child in (*everyone, *trainers):
        child.say("end")
    seen = {name: [r.result() for r in ranks] for name, ranks in readers.items()}
    return max(trainer.result() for trainer in trainers), seen


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


@pytest.mark.parametrize("late", [0.2, pytest.param(2.0, marks=pytest.mark.slow)])
def test_every_round_waits_for_all_trainer_ranks_on_all_replicas(
    processes: Processes, address: str, late: float
) -> None:
    _, seen = _run(processes, address, Rounds(3, 1000, 10, late=late))

    _check(seen, 10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pushes", "hold"), [(20, 0.02), pytest.param(200, 0.05, marks=pytest.mark.slow)]
)
def test_readers_slower_than_the_trainers_hold_them_back_and_see_every_version(
    processes: Processes, address: str, pushes: int, hold: float
) -> None:
    ended, seen = _run(processes, address, Rounds(1, 2 * MIB, pushes, hold=hold))

    _check(seen, pushes)
    everyone = [found for ranks in seen.values() for found in ranks]
    assert max(found.last for found in everyone) - ended <= 5.0
    shared = {
        name: {found.shared_mib // 8 for found in ranks} for name, ranks in seen.items()
    }
    assert {"solo": {1}, "pair": {2}, "place": {1}} == shared  # models of 8 MiB


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
