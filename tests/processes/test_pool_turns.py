"""Pushes and receives of a pool in turn: who comes first, and who comes late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

import weightsync
from tests.processes.driven import MIB, Held, ask, call
from tests.processes.pools import SECONDS, Pool
from weightsync.vigil import BEATS, DEFAULT_LEASE

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes
    from tests.processes.rig import Mode

pytestmark = pytest.mark.usefixtures("engine")

TRAINERS = 2
REPLICAS: tuple[tuple[str, int, Mode], ...] = (
    ("solo", 1, "staged"),
    ("pair", 2, "swap"),
)

LOST_SECONDS = 0.8 * DEFAULT_LEASE / BEATS
"""What no push may take: signs of life may wake whoever lost a wake-up, a little later
than this at most. The limit for all pushes together would hide that."""


def test_a_version_pushed_before_anybody_waits_is_received_at_once(
    processes: Processes, address: str
) -> None:
    pool = Pool(processes, address, numel=MIB)
    pool.join("solo")
    pool.join("pair", ranks=2, mode="swap")
    pushed = pool.push(1)
    received = [call(rank, "receive", timeout=SECONDS) for rank in pool.ranks()]
    held = [call(rank, "held").value for rank in pool.ranks()]

    assert {"solo", "pair"} == set(pushed.value.delivered)
    assert [1] * 3 == [each.value.version for each in received]
    assert max(each.seconds for each in received) < 1.0
    assert [Held(1, 1)] * 3 == held
    assert pool.close() < 5.0


@pytest.mark.parametrize(
    "ending", ["kill", pytest.param("close", marks=pytest.mark.slow)]
)
def test_resumed_trainers_publish_to_replicas_that_wait_for_them_without_a_step(
    ending: str, processes: Processes, address: str
) -> None:
    pool = Pool(processes, address, numel=MIB)
    pool.join("solo")
    pool.join("pair", ranks=2, mode="swap")
    pool.join("place", ranks=2, mode="inplace")
    pool.deliver(1)
    for rank in pool.ranks():
        ask(rank, "receive", timeout=SECONDS)
    for trainer in pool.trainers:
        trainer.kill() if ending == "kill" else trainer.say(None)
        trainer.join()
    told = [rank.hear() for rank in pool.ranks()]
    resumed = pool.succeed(2, *pool.trainers)
    next_one = pool.deliver(3)

    kind = "PeerError" if ending == "kill" else "ClosedError"
    assert [kind] * 5 == [each.kind for each in told]
    names = {"solo", "pair", "place"}
    assert [names] * 2 == [set(each.value.delivered) for each in (resumed, next_one)]
    assert pool.close() < 5.0


async def _push(
    control: Control, address: str, rank: int, turns: int, device: str
) -> tuple[float, float]:
    """Push one element, over and over; rank 1 pushes another one.

    Returns the seconds of all pushes, and of the longest.
    """
    source = torch.zeros(1).to(device)
    state = {f"w.{rank}": source}
    async with weightsync.Trainer(
        address, rank=rank, world_size=TRAINERS, timeout=SECONDS
    ) as transport:
        await transport.wait_for_replicas(len(REPLICAS))
        longest, began = 0.0, time.monotonic()
        for version in range(1, turns + 1):
            source.copy_(torch.full((1,), float(version)))
            started = time.monotonic()
            await transport.push(state, require="all", timeout=SECONDS)
            longest = max(longest, time.monotonic() - started)
    return time.monotonic() - began, longest


async def _receive(
    control: Control,
    address: str,
    place: tuple[str, int, int, Mode],
    turns: int,
    device: str,
) -> tuple[float, ...]:
    """Receive every version; return the last one, or the first that was not exact."""
    name, rank, size, mode = place
    weights = {f"w.{part}": torch.full((1,), -777.0).to(device) for part in range(2)}
    found: tuple[float, ...] = ()
    async with weightsync.Generator(
        address,
        weights,
        replica=name,
        rank=rank,
        world_size=size,
        mode=mode,
        timeout=SECONDS,
    ) as transport:
        for version in range(1, turns + 1):
            update = await transport.receive(timeout=SECONDS)
            values = [float(tensor.cpu()) for tensor in weights.values()]
            found = (update.version, *values)
            if found != (version, version, version):
                break
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "turns", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=str
)
def test_no_wake_up_is_lost_in_many_turns_of_one_element(
    turns: int, processes: Processes, address: str
) -> None:
    trainers = [
        processes.start(_push, address, rank, turns, processes.device)
        for rank in range(TRAINERS)
    ]
    ranks = [
        processes.start(
            _receive, address, (name, rank, size, mode), turns, processes.device
        )
        for name, size, mode in REPLICAS
        for rank in range(size)
    ]
    found = [rank.result(120) for rank in ranks]
    seconds = [trainer.result() for trainer in trainers]

    assert [(turns, turns, turns)] * 3 == found
    assert max(whole for whole, _ in seconds) < 60.0
    assert max(longest for _, longest in seconds) < LOST_SECONDS
