"""Windows of torch's own process group: the same push, and the same bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import SENTINEL, Held, ask, call
from tests.processes.rig import MODES, SECONDS, Job, Mode, on, open_job
from tests.processes.single import BLOCKING, FAULTS, GRACE, TIMEOUT, Pool, joined
from weightsync import testing
from weightsync.packing import PUT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Control

pytestmark = [testing.requires_emulator(), pytest.mark.emulated]

ENGINES = ("nccl", "torch-nccl2")


def _part(whole: torch.Tensor, top: int, left: int, *shape: int) -> weightsync.Shard:
    part = whole[top:, left:][: shape[0], : shape[1]].contiguous()
    return weightsync.Shard(part, global_shape=tuple(whole.shape), offsets=(top, left))


async def _joined(job: Job, engine: str, mode: Mode, *ranks: Mapping[str, Any]) -> Any:
    generators = []
    for rank, state in enumerate(ranks):
        generator = weightsync.Generator(
            job.address,
            state,
            replica=engine,
            rank=rank,
            world_size=len(ranks),
            mode=mode,
            timeout=SECONDS,
            engine=engine,  # type: ignore[arg-type] # one of both
        )
        generators.append(await job.enter(generator))
    for trainer in job.trainers:
        await trainer.wait_for_replicas(1, timeout=SECONDS)
    return generators


async def _pushed(engine: str, mode: Mode) -> list[bytes]:
    """Push rows of two ranks to columns of two ranks, twice; return what arrived."""
    wide = PUT_BYTES // 64 + 10
    whole = torch.arange(20 * wide, dtype=torch.int32).reshape(20, wide)
    half = wide // 2
    small = torch.arange(7, dtype=torch.bfloat16)
    nothing = torch.zeros_like(whole)
    held = [
        on("cuda", 2 + i, {"m": _part(nothing, 0, i * half, 20, half), "s": small * 0})
        for i in range(2)
    ]
    async with open_job(2, "cuda") as job:
        generators = await _joined(job, engine, mode, *held)
        for version in (1, 2):
            now = whole + version
            sources = [
                on("cuda", i, {"m": _part(now, 10 * i, 0, 10, wide), "s": small})
                for i in range(2)
            ]
            await job.deliver(generators, *sources)
    found = [tensor for state in held for tensor in (state["m"].tensor, state["s"])]
    return [bytes(each.cpu().view(torch.uint8).numpy()) for each in found]


async def _both(control: Control, mode: Mode) -> list[list[bytes]]:
    os.environ[BLOCKING] = "1"
    return [await _pushed(engine, mode) for engine in ENGINES]


@pytest.mark.parametrize("mode", MODES)
def test_a_push_over_windows_of_torch_brings_the_same_bytes(
    mode: Mode, processes: EmulatedProcesses
) -> None:
    ours, theirs = processes.start(_both, mode).result(60)

    assert ours == theirs
    assert any(ours[0])


async def _refused(control: Control) -> str:
    os.environ.pop(BLOCKING, None)
    weights = on("cuda", 0, {"w": torch.zeros(4)})
    try:
        weightsync.Generator("tcp://127.0.0.1:1", weights, engine="torch-nccl2")
    except weightsync.UnsupportedError as error:
        return str(error)
    return ""


def test_windows_of_torch_want_calls_of_nccl_that_return_when_they_are_done(
    processes: EmulatedProcesses,
) -> None:
    found = processes.start(_refused).result(60)

    assert "NCCL_COMM_BLOCKING=1" in found


# Faults


@pytest.mark.slow
def test_a_trainer_over_torch_that_dies_leaves_the_old_version(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address, "torch-nccl2")
    trainer = pool.trainer("put@n=3:kill")
    generator = pool.generator()
    joined(trainer, 1)
    ask(generator, "receive", timeout=15)
    ask(trainer, "push", version=1, timeout=TIMEOUT)
    trainer.join()
    received = generator.hear()

    assert "PeerError" == received.kind, received
    assert Held(None, SENTINEL) == call(generator, "held").value
    assert driven.close(generator) < 5


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_a_push_over_torch_that_nccl_fails_ends_in_time_and_for_its_replica_only(
    case: str, processes: EmulatedProcesses, address: str
) -> None:
    sending, receiving = FAULTS[case]
    pool = Pool(processes, address, "torch-nccl2")
    trainer = pool.trainer(sending)
    broken = pool.generator(receiving)
    joined(trainer, 1)
    ask(broken, "receive", timeout=15)
    failed = call(trainer, "push", version=1, timeout=TIMEOUT)
    received = broken.hear()
    healthy = pool.generator()
    joined(trainer, 1)
    ask(healthy, "receive", timeout=15)
    pushed = call(trainer, "push", version=2, timeout=TIMEOUT)
    healthy.hear()

    assert failed.kind in {"PeerError", "TimedOutError", "WeightSyncError"}, failed
    assert failed.seconds < TIMEOUT + GRACE
    assert "ok" != received.kind
    assert (("gen-1",), {}) == (pushed.value.delivered, pushed.value.failed)
    assert driven.close(healthy) < 5
    assert driven.close(broken, trainer) < 10


@pytest.mark.slow
def test_a_replica_over_torch_that_dies_in_a_push_fails_alone(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address, "torch-nccl2")
    trainer, dies, watch = pool.trainer(), pool.generator(), pool.generator()
    joined(trainer, 2)
    call(dies, "kill_at_first_byte", pid=dies.pid, number=9)
    ask(watch, "receive", timeout=15)
    pushed = call(trainer, "push", version=1, timeout=TIMEOUT)
    received = watch.hear()

    assert ("gen-1",) == pushed.value.delivered
    assert {"gen-0"} == set(pushed.value.failed)
    assert 1 == received.value.version
    assert driven.close(watch, trainer) < 10


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["init", "window_register", "signal"])
def test_a_replica_over_torch_that_dies_while_its_link_forms_delays_nobody(
    fault: str, processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address, "torch-nccl2")
    trainer = pool.trainer()
    dies = pool.generator(f"{fault}@n=1:kill")
    dies.join()
    healthy = pool.generator()
    joined(trainer, 1)
    ask(healthy, "receive", timeout=15)
    pushed = call(trainer, "push", version=1, timeout=TIMEOUT)
    received = healthy.hear()

    assert ("gen-1",) == pushed.value.delivered
    assert 1 == received.value.version
    assert driven.close(healthy, trainer) < 10
