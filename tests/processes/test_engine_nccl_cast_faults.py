"""What is converted on its way over NCCL when something goes wrong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.placing import placed
from tests.processes.ranks import in_threads
from tests.processes.rig import SECONDS, Job, on, open_job
from tests.processes.test_engine_nccl_cast import LARGE, octets
from tests.processes.test_exact_cast_stopped import DIGEST, manifest
from weightsync import testing
from weightsync.engine_nccl import NcclEngine
from weightsync.epoch import Mode
from weightsync.link import GeneratorLink, TrainerLink
from weightsync.memory import Memory
from weightsync.messages import FormLink, Layout, Put
from weightsync.remembered import Remembered
from weightsync.slots import Slots
from weightsync.together import Together

if TYPE_CHECKING:
    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Control

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.emulated,
    pytest.mark.timeout(60),
]

TIMEOUT, GRACE = 3.0, 3.0


async def _fails(control: Control, faults: str) -> Any:
    """Push to two replicas while something goes wrong for one of them, then again."""
    state = {"m": torch.linspace(-1000, 1000, LARGE)}
    wanted, before = [
        octets({"m": value.bfloat16()}) for value in (state["m"], torch.zeros(LARGE))
    ]
    pushed = on("cuda", 0, state)
    weights = [
        on("cuda", 1 + rank, {"m": torch.zeros(LARGE, dtype=torch.bfloat16)})
        for rank in range(2)
    ]
    with placed(kernels=True):
        async with open_job(1, "cuda") as job:
            generators = [await job.join_one(state) for state in weights]
            testing.inject(faults)
            (report,) = await job.push(pushed, cast=True, timeout=TIMEOUT)
            (good,) = [int(name[-1]) for name in report.delivered]
            await generators[good].receive(timeout=SECONDS)
            held = [octets(weights[rank]) for rank in (good, 1 - good)]
            testing.inject("")
            await _back(job, generators[1 - good], 2)
            await job.deliver(generators, pushed, cast=True)
    (failed,) = report.failed.values()
    return (
        failed,
        report.seconds,
        [wanted, before] == held,
        [wanted] * 2 == [octets(state) for state in weights],
    )


async def _back(job: Job, generator: weightsync.Generator, count: int) -> None:
    """Let a replica that was removed join again: its next call raises, then it does.

    That call ends before anything was received.
    """
    with pytest.raises(weightsync.WeightSyncError):
        await generator.receive(timeout=SECONDS)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(generator.receive, timeout=SECONDS))
        await job.trainers[0].wait_for_replicas(count, timeout=SECONDS)
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ("put@n=2:fail=3", "ncclPutSignal failed: internal error"),
        pytest.param(
            "put@n=2:stall", "timed out: not all was put", marks=pytest.mark.slow
        ),
    ],
    ids=["refused", "never ends"],
)
def test_a_put_of_what_was_converted_that_fails_concerns_its_replica_only(
    faults: str, reason: str, processes: EmulatedProcesses
) -> None:
    failed, seconds, exact, all_in_the_end = processes.start(_fails, faults).result(50)

    assert reason in failed
    assert seconds < TIMEOUT + GRACE
    assert exact
    assert all_in_the_end


async def _no_kernel(control: Control) -> Any:
    """Convert where the CPU does not compute for the emulator, which refuses that."""
    pushed = on("cuda", 0, {"m": torch.ones(7), "same": torch.ones(7)})
    half = {**pushed, "m": pushed["m"].cpu().bfloat16().to("cuda:0")}
    zero = {"m": torch.zeros(7, dtype=torch.bfloat16), "same": torch.zeros(7)}
    weights = on("cuda", 1, zero)
    async with open_job(1, "cuda") as job:
        generator = await job.join_one(weights)
        (outcome,) = await job.outcomes(pushed, cast=True, timeout=TIMEOUT)
        untouched = octets(zero) == octets(weights)
        await _back(job, generator, 1)
        await job.deliver(generator, half)
    exact = octets(half) == octets(weights)
    return type(outcome).__name__, str(outcome), untouched, exact


def test_a_kernel_that_is_refused_ends_the_push_and_names_the_tensor(
    processes: EmulatedProcesses,
) -> None:
    kind, told, untouched, exact = processes.start(_no_kernel).result(50)

    assert "WeightSyncError" == kind
    assert "'gen-0': trainer rank 0: cannot convert 'm' to torch.bfloat16: CUDA" in told
    assert untouched
    assert exact


async def _lost(control: Control) -> str:
    """Put from a tensor that has no memory any more, over a link of one each."""
    pushed, wanted = manifest("float32"), manifest("bfloat16")
    slots = Slots.of(Mode.STAGED, wanted)
    engines = [NcclEngine(torch.device("cuda", number)) for number in range(2)]
    layout = Layout(DIGEST, Together.of([pushed]))
    layouts: Remembered[bytes, Layout] = Remembered()
    layouts.put(DIGEST, layout)
    trainer = TrainerLink(0, layouts, engines[0])
    generator = GeneratorLink(0, slots, engines[1])
    generator.learn(layout)
    handles = trainer.handle, generator.handle
    form = FormLink(0, 7, handles, 1, SECONDS, Together.of([wanted]))
    memory = engines[1].memory(generator.group, slots.nbytes)
    in_threads(
        [
            lambda: trainer.join(form),
            lambda: generator.join(form, Memory([memory], slots.segments)),
        ]
    )
    tensors = [torch.empty(spec.box.sizes, device="cuda:0") for spec in pushed.tensors]
    tensors[0].untyped_storage().resize_(0)
    try:
        await trainer.put(Put(0, 0, 1, 0, 1, DIGEST), tensors)
    except weightsync.PlanError as error:
        return str(error)
    finally:
        trainer.abort()
        generator.abort()
    return ""


def test_a_source_that_has_lost_its_memory_is_an_error_that_names_it(
    processes: EmulatedProcesses,
) -> None:
    found = processes.start(_lost).result(50)

    assert found.startswith("cannot convert 'w' to torch.bfloat16: ")
