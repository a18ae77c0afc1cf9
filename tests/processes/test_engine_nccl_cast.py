"""What is converted on its way over NCCL: which kernels, through which memory.

All else that arrives is in test_exact_cast.py, what goes wrong meanwhile in
test_engine_nccl_cast_faults.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes.driven import MIB
from tests.processes.placing import LAUNCHED, placed
from tests.processes.rig import (
    MODES,
    Job,
    Mode,
    on,
    open_job,
    receive_all,
)
from tests.processes.single import BLOCKING
from tests.processes.test_straight import local, open_straight, registered
from weightsync import testing
from weightsync.packing import PUT_BYTES
from weightsync.plan import CAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Control

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.emulated(strict=True),
    pytest.mark.timeout(60),
]

ROWS, COLUMNS = 48, 1 << 15
"""Of a matrix that is three MiB large when it is bfloat16."""

SEGMENT = 1 << 20
"""Bytes: small, so that there are several segments, and the matrix is one of them."""

KERNELS = ("Launch", "a launch")
NEW = ("MemAlloc", "Malloc", "HostAlloc", "StreamCreate", "Register", "CommInit")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy2DAsync")


def counted(parts: tuple[str, ...]) -> int:
    """Calls until now of functions whose names have one of these parts."""
    found = testing.calls()
    found.pop("cudaLaunchHostFunc", None)  # which runs on the host
    return sum(found[name] for name in found if any(part in name for part in parts))


def model(version: int) -> dict[str, Tensor]:
    """What is converted, small and larger than a chunk, and what is not."""
    count = ROWS * COLUMNS
    return {
        "m": torch.arange(count).add(version).mul(1.001).view(ROWS, COLUMNS),
        "one": torch.tensor([version + 0.3]),
        "same": torch.arange(7 * version, 7 * version + 70, dtype=torch.int32),
        "last": torch.linspace(-3, version, 501),
    }


DTYPES = {"m": torch.bfloat16, "one": torch.float8_e4m3fn, "last": torch.float64}


def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name].to(DTYPES.get(name, state[name].dtype)) for name in state}


def half(whole: Tensor, rank: int, dim: int) -> weightsync.Shard:
    size = whole.shape[dim] // 2
    part = whole.narrow(dim, rank * size, size).contiguous()
    offsets = (rank * size, 0) if dim == 0 else (0, rank * size)
    return weightsync.Shard(part, global_shape=tuple(whole.shape), offsets=offsets)


def cut(state: Mapping[str, Tensor], rank: int, dim: int) -> dict[str, Any]:
    """What one of two ranks has: half of the matrix, and all of the others."""
    return {**state, "m": half(state["m"], rank, dim)}


def zeros(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def octets(state: Mapping[str, Any]) -> dict[str, bytes]:
    found = {name: local(value).cpu().contiguous() for name, value in state.items()}
    return {name: found[name].view(torch.uint8).numpy().tobytes() for name in found}


EXPECTED = [octets(cut(converted(model(1)), rank, 1)) for rank in range(2)]
"""What two ranks of a replica hold that have got version 1."""


async def _joined(job: Job, mode: Mode) -> Any:
    """Join a replica of two ranks, which have columns; return what they hold too."""
    empty = converted(zeros(model(0)))
    held = [on("cuda", 2 + rank, cut(empty, rank, 1)) for rank in range(2)]
    return held, await job.join(*held, mode=mode, segment_bytes=SEGMENT)


# Kernels

PUSHES = 3
LARGE = PUT_BYTES // 2 + MIB  # more than a chunk, when it is bfloat16
CASTS = -(-2 * LARGE // CAST_BYTES)
"""Pieces that it is converted in."""


async def _counts(control: Control, mode: Mode) -> Any:
    """Push halves of two trainer ranks to a whole, several times."""
    whole = torch.linspace(-1000, 1000, 2 * LARGE).view(2, LARGE)
    state = {"m": whole, "same": torch.arange(70), "one": torch.tensor([0.3])}
    expected = octets(
        {"m": whole.bfloat16(), "same": state["same"], "one": state["one"].half()}
    )
    pushed = [on("cuda", rank, cut(state, rank, 0)) for rank in range(2)]
    weights = on(
        "cuda",
        2,
        {
            "m": torch.zeros(2, LARGE, dtype=torch.bfloat16),
            "same": torch.zeros(70, dtype=torch.int64),
            "one": torch.zeros(1, dtype=torch.float16),
        },
    )
    found: list[Any] = []
    new: list[int] = []
    with placed(kernels=True):
        async with open_job(2, "cuda") as job:
            generator = await job.join_one(weights, mode=mode)
            launched = counted(KERNELS)
            for _ in range(PUSHES):
                LAUNCHED.clear()
                await job.deliver(generator, *pushed, cast=True)
                found.append((expected == octets(weights), dict(LAUNCHED)))
                new.append(counted(NEW))
    return found, counted(KERNELS) - launched, new[-1] - new[0]


@pytest.mark.parametrize(
    "mode", ["inplace", *[pytest.param(m, marks=pytest.mark.slow) for m in MODES[:2]]]
)
def test_each_piece_that_is_converted_is_one_kernel_and_nothing_else_is(
    mode: Mode, processes: EmulatedProcesses
) -> None:
    found, others, new = processes.start(_counts, mode).result(50)

    assert [(True, {"copy_": 2 * CASTS + 1})] * PUSHES == found
    assert 0 == others
    assert 0 == new


# Where sources lie


async def _straight(control: Control) -> Any:
    """Push straight out of registered memory; return what was copied on the way."""
    pushed = [registered(rank, cut(model(1), rank, 0)) for rank in range(2)]
    with placed(kernels=True):
        async with open_straight(*pushed) as job:
            held, generators = await _joined(job, "inplace")
            before = counted(COPIES)
            await job.deliver(generators, *pushed, cast=True)
            copies = counted(COPIES) - before
    return EXPECTED == [octets(state) for state in held], copies, dict(LAUNCHED)


def test_with_memory_that_nccl_knows_only_what_is_converted_takes_a_chunk(
    processes: EmulatedProcesses,
) -> None:
    exact, copies, kernels = processes.start(_straight).result(50)

    headers, reads = 4, 2
    to_each = {"m": 2, "one": 1, "last": 1}

    assert exact
    assert headers + reads == copies
    assert {"copy_": 2 * sum(to_each.values())} == kernels


async def _replayed(control: Control, straight: bool) -> Any:
    """Let a replica join after a push, and overwrite what was pushed."""
    options: dict[str, Any] = {} if straight else {"staging": "copy", "memory": None}
    pushed = [registered(rank, cut(model(1), rank, 0)) for rank in range(2)]
    with placed(kernels=True):
        async with open_straight(*pushed, replay=True, **options) as job:
            _, first = await _joined(job, "staged")
            await job.push(*pushed, cast=True)
            await receive_all(first)
            for state in pushed:
                for value in state.values():
                    local(value).zero_()
            LAUNCHED.clear()
            held, late = await _joined(job, "inplace")
            updates = await receive_all(late)
    exact = EXPECTED == [octets(state) for state in held]
    return exact, [update.version for update in updates], dict(LAUNCHED)


@pytest.mark.parametrize(
    "straight", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_replay_converts_again_on_the_host_what_is_kept_there(
    straight: bool, processes: EmulatedProcesses
) -> None:
    exact, versions, kernels = processes.start(_replayed, straight).result(50)

    assert exact
    assert [1, 1] == versions
    assert {} == kernels


# Windows of torch's own


async def _over_torch(control: Control) -> bool:
    os.environ[BLOCKING] = "1"
    pushed = [on("cuda", rank, cut(model(1), rank, 0)) for rank in range(2)]
    with placed(kernels=True):
        async with open_job(2, "cuda") as job:
            empty = converted(zeros(model(0)))
            held = [on("cuda", 2 + rank, cut(empty, rank, 1)) for rank in range(2)]
            generators = await job.join(*held, engine="torch-nccl2")
            await job.deliver(generators, *pushed, cast=True)
    return EXPECTED == [octets(state) for state in held]


@pytest.mark.slow
def test_windows_of_torch_bring_what_is_converted_too(
    processes: EmulatedProcesses,
) -> None:
    assert processes.start(_over_torch).result(50)
