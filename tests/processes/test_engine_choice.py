"""Which engine a job uses: as the tensors lie, as it is told, and one for everybody."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import weightsync
from tests.processes.rig import SECONDS, on, open_job
from weightsync import testing
from weightsync.engine_nccl import NcclEngine
from weightsync.engine_torch import TorchNcclEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.processes.harness import Control, Processes


pytestmark = pytest.mark.emulated


def error_of(call: Callable[[], object]) -> str:
    """Return class and message of what a call raises."""
    try:
        call()
    except weightsync.WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def opening(transport: Any) -> str:
    """Return what opening raises."""
    if found := await error_while(transport.__aenter__()):
        return found
    await transport.aclose()
    return ""


async def error_while(call: Awaitable[object]) -> str:
    """Return class and message of what a call raises."""
    try:
        await call
    except weightsync.WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def state(device: str, number: int = 0, **dtype: torch.dtype) -> dict[str, Any]:
    return on(device, number, {"w": torch.zeros(4, **cast("Any", dtype))})


def test_an_engine_that_there_is_not_is_refused() -> None:
    name = cast("Any", "gloo")
    found = [
        error_of(lambda: weightsync.Trainer("tcp://127.0.0.1:1", engine=name)),
        error_of(
            lambda: weightsync.Generator("tcp://127.0.0.1:1", state("cpu"), engine=name)
        ),
    ]

    known = "'shm', 'nccl', 'torch-nccl2'"
    assert [f"PlanError: engine is one of {known} or None, not 'gloo'"] * 2 == found


def test_an_engine_needs_tensors_on_its_device() -> None:
    found = error_of(
        lambda: weightsync.Generator("tcp://127.0.0.1:1", state("cpu"), engine="nccl")
    )

    assert found.startswith("PlanError: engine 'nccl' needs tensors on cuda; 'w' is on")


async def _differs(control: Control) -> list[str]:
    """Let replicas on both kinds of devices join, and push from both."""
    found = []
    gpu, other = state("cuda", 1), state("cuda", 2)
    mixed = {**gpu, "v": other["w"]}
    found.append(error_of(lambda: weightsync.Generator("tcp://127.0.0.1:1", mixed)))
    async with open_job(1, "cuda") as job:
        await job.join_one(gpu)
        late = weightsync.Generator(
            job.address, state("cpu"), replica="late", rank=0, world_size=1, timeout=5
        )
        found.append(await opening(late))
        for pushed in (state("cpu"), state("cuda", 3)):
            (outcome,) = await job.outcomes(pushed)
            found.append(f"{type(outcome).__name__}: {outcome}")
        await job.push(state("cuda", 0))
    return found


@testing.requires_emulator()
def test_who_differs_is_refused_and_both_are_named(processes: Processes) -> None:
    mixed, late, cpu, elsewhere = processes.start(_differs).result()

    assert mixed.startswith("PlanError: all tensors must be on one device: 'w' is on ")
    assert "cuda:1, and 'v' on cuda:2" in mixed
    assert late.startswith("PlanError: ")
    assert "replica 'late' uses engine 'shm' and replica 'gen-0' uses 'nccl'" in late
    assert "'w' is on cpu, but the replicas receive over engine 'nccl'" in cpu
    assert "'w' is on cuda:3, but" in elsewhere
    assert "this rank puts from cuda:0" in elsewhere


async def _told(control: Control) -> str:
    """Let a replica on the CPU meet a trainer that was told to use NCCL."""
    trainer = weightsync.Trainer(
        "tcp://127.0.0.1:0", rank=0, world_size=1, timeout=10, engine="nccl"
    )
    async with trainer:
        generator = weightsync.Generator(
            trainer.address,
            state("cpu"),
            replica="gen-0",
            rank=0,
            world_size=1,
            timeout=5,
        )
        return await opening(generator)


@testing.requires_emulator()
def test_a_trainer_that_was_told_refuses_another_engine(processes: Processes) -> None:
    found = processes.start(_told).result()

    assert "replica 'gen-0' uses engine 'shm' and trainer rank 0 uses 'nccl'" in found


def _meetings(control: Control, host: str) -> list[str]:
    os.environ["NCCL_COMM_BLOCKING"] = "1"  # which torch's needs
    found = []
    for engine in (NcclEngine(), TorchNcclEngine()):
        engine.host = host
        found.append(engine.group(first=True).get_reconfigure_handle())
    return found


@testing.requires_emulator()
def test_the_ranks_of_a_link_meet_on_the_interface_of_the_control_plane(
    processes: Processes,
) -> None:
    handles = processes.start(_meetings, "127.0.0.2").result(30)

    assert [True, True] == ["127.0.0.2:" in handle for handle in handles]


async def _shares_a_gpu(control: Control) -> list[str]:
    """Let a replica join on the GPU of the trainer, which NCCL takes once."""
    async with open_job(1, "cuda") as job:
        generator = weightsync.Generator(
            job.address, state("cuda"), replica="here", rank=0, world_size=1
        )
        await job.enter(generator)
        refused = await error_while(generator.receive(timeout=SECONDS))
        (trainer,) = job.trainers
        waited = await error_while(trainer.wait_for_replicas(1, timeout=0.1))
        pushed = await error_while(job.push(state("cuda"), timeout=SECONDS))
    return [refused, waited, pushed]


@testing.requires_emulator()
def test_whoever_waits_for_a_replica_is_told_why_the_last_one_failed(
    processes: Processes,
) -> None:
    refused, waited, pushed = processes.start(_shares_a_gpu).result(30)

    reason = "both use GPU 0"
    assert reason in refused
    assert "; replica 'here' failed: " in waited
    assert reason in waited
    assert "no replica has joined (wait_for_replicas waits for them); " in pushed
    assert reason in pushed
