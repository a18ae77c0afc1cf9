"""Limits of the machine: an exception that can be acted on, never a dead process."""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven, ranks
from tests.processes.driven import MIB, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.harness import Control, Processes


def _limit_memory(mib: int) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0])
    limit = size * os.sysconf("SC_PAGE_SIZE") + mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_files(mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (mib * MIB, mib * MIB))


def _allocates(control: Control, limit: Callable[[int], None]) -> str:
    (group,) = ranks.form(1)
    limit(200)
    try:
        weightsync.Window.allocate(group, 400 * MIB)
    except weightsync.WeightSyncError as error:
        message = str(error)
    # What fits still works.
    weightsync.Window.allocate(group, 50 * MIB).fill_(1)
    group.shutdown()
    return message


@pytest.mark.parametrize("limit", [_limit_memory, _limit_files])
def test_a_window_over_the_limit_is_an_exception(
    limit: Callable[[int], None], processes: Processes
) -> None:
    child = processes.start(_allocates, limit)

    assert f"{400 * MIB} bytes" in child.result()
    assert 0 == child.join()


async def _limited_generator(control: Control, address: str) -> str:
    weight = torch.zeros(100 * MIB)
    _limit_memory(300)
    transport = weightsync.Generator(
        address, {"w": weight}, replica="large", rank=0, world_size=1, timeout=5
    )
    try:
        async with transport:
            return "opened"
    except weightsync.WeightSyncError as error:
        return str(error)


async def _limited_trainer(control: Control, address: str) -> str:
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        control.say("open")
        _limit_memory(500)
        await control.ahear()
        # The link is formed when the window of the replica is mapped.
        return str(await driven.timed(transport.wait_for_replicas(1, timeout=2)))


def test_a_generator_without_memory_raises(processes: Processes, address: str) -> None:
    trainer = processes.start(driven.trainer, address, 0, 1, MIB)

    assert trainer.hear() == "open"
    assert (
        "bytes of shared memory"
        in processes.start(_limited_generator, address).result()
    )
    assert driven.close(trainer) < 5


def test_a_trainer_that_cannot_map_a_window_goes_on_without_that_replica(
    processes: Processes, address: str
) -> None:
    trainer = processes.start(_limited_trainer, address)

    assert trainer.hear() == "open"
    generator = processes.start(driven.generator, address, "gen", 0, 1, 600 * MIB)

    assert generator.hear() == "open"
    told = call(generator, "receive", timeout=10)

    assert "PeerError" == told.kind
    assert "trainer rank 0" in told.value
    assert "bytes of shared memory" in told.value
    trainer.say("wait")

    assert "0 joined" in trainer.result()
    assert driven.close(generator) < 5


def _anonymous_files() -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{name}").readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:weightsync"):
            found.append(int(name))
    return found


def test_a_window_is_private_to_its_user() -> None:
    (group,) = ranks.form(1)
    memory = weightsync.Window.allocate(group, 3 * MIB)
    shared = [fd for fd in _anonymous_files() if os.fstat(fd).st_size == 3 * MIB]

    assert 1 == len(shared)
    assert 0o600 == stat.S_IMODE(os.fstat(shared[0]).st_mode)
    assert memory.numel() == 3 * MIB
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(shared[0], 0)  # sealed: it cannot be shrunk under a reader
    group.shutdown()


async def _raises(call_: Any, *kinds: type[Exception]) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(kinds) as found:
        await call_
    return str(found.value), time.monotonic() - started


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_taken_or_mute_port_is_an_error_in_time(backend: str, address: str) -> None:
    port = int(address.rpartition(":")[2])
    weights = {"w": torch.zeros(4)}

    async def main() -> None:
        lonely = weightsync.Trainer(address, rank=0, world_size=1, timeout=1)
        message, seconds = await _raises(lonely.__aenter__(), weightsync.PeerError)

        assert f"tcp://127.0.0.1:{port}" in message
        assert "in use" in message
        assert seconds < 1
        for transport in (
            weightsync.Trainer(address, rank=1, world_size=2, timeout=1),
            weightsync.Generator(
                address, weights, replica="gen", rank=0, world_size=1, timeout=1
            ),
        ):
            kinds = (weightsync.TimedOutError, weightsync.PeerError)
            message, seconds = await _raises(transport.__aenter__(), *kinds)

            assert f"tcp://127.0.0.1:{port}" in message
            assert seconds < 4

    with socket.create_server(("127.0.0.1", port)):
        anyio.run(main, backend=backend)
