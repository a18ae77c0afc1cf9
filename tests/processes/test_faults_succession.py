"""New trainers take over from killed ones, at the same address."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

import weightsync

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes
    from tests.processes.rig import Mode

ELEMENTS = 16 << 20


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), value)}


def _only_value(tensor: torch.Tensor) -> float | None:
    value = float(tensor[0])
    return value if bool((tensor == value).all()) else None


def _trainer(control: Control, address: str, values: list[float]) -> None:
    with weightsync.blocking.Trainer(address, timeout=20) as transport:
        transport.wait_for_replicas(1)
        for value in values:
            pushed = _weights(value)
            control.say(value)
            transport.push(pushed)
        control.hear()


@pytest.mark.parametrize("mode", ["staged", "swap", "inplace"])
@pytest.mark.asyncio
async def test_a_new_trainer_goes_on_where_a_killed_one_was(
    processes: Processes, address: str, mode: Mode
) -> None:
    first = processes.start(_trainer, address, [1.0, 2.0, 3.0, 4.0])
    tensor = torch.full((ELEMENTS,), -777.0)
    async with weightsync.Generator(
        address, {"w": tensor}, replica="g", mode=mode, timeout=20
    ) as generator:
        await generator.receive(timeout=20)
        while first.hear() != 3.0:
            await generator.receive(timeout=20)
        first.kill()
        with pytest.raises(weightsync.PeerError, match="trainer"):
            while True:
                await generator.receive(timeout=10)
        version = generator.version
        kept = _only_value(tensor)
        with contextlib.suppress(weightsync.EpochError), generator.use() as weights:
            assert version == weights.version

    second = processes.start(_trainer, address, [9.0])
    async with weightsync.Generator(
        address, {"w": tensor}, replica="g", mode=mode, timeout=20
    ) as generator:
        await generator.receive(timeout=20)
    second.say("end")
    second.result()

    assert kept == version or (mode == "inplace" and version is None)
    assert 9.0 == _only_value(tensor)
