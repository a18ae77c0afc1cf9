"""Windows of several allocations: what arrives in them, and how little a trainer takes.

A budget bounds the memory of a trainer rank, whatever the size of the model.
"""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call
from tests.processes.rig import MODES, Mode, on, open_job, raw, together
from weightsync import testing
from weightsync.budget import FEW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Child, Control

pytestmark = [testing.requires_emulator(), pytest.mark.emulated]

SEGMENT = 1 << 16

ROWS, COLUMNS = 96, 128
"""Of a matrix of int32: three quarters of a segment."""


def model(version: int) -> dict[str, Tensor]:
    """Tensors smaller than a segment, about as large, and larger; none aligned."""
    sizes = {"small": 33, "bias": 1, "half": SEGMENT // 2, "large": 3 * SEGMENT + 5}
    found = {
        name: torch.arange(size).add(version).to(torch.uint8)
        for name, size in sizes.items()
    }
    found |= {f"m{number}": matrix(version + number) for number in range(4)}
    return {**found, "last": torch.full((7,), version, dtype=torch.bfloat16)}


def matrix(start: int) -> Tensor:
    return torch.arange(start, start + ROWS * COLUMNS, dtype=torch.int32).view(
        ROWS, COLUMNS
    )


def zeros(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def octets(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bytes(raw(tensor.cpu())) for name, tensor in state.items()}


# What arrives


async def _modes(control: Control, mode: Mode) -> list[bool]:
    """Push all of it and parts of it in turn; what is not pushed keeps its value."""
    expected = model(0)
    weights = on("cuda", 2, zeros(expected))
    exact: list[bool] = []
    async with open_job(2, "cuda") as job:
        generator = await job.join_one(weights, mode=mode, segment_bytes=SEGMENT)
        for version in range(1, 6):
            state = model(version)
            if version % 2 == 0:
                for name in ("m1", "large", "bias"):
                    del state[name]
            expected |= state
            pushed = [on("cuda", rank, state) for rank in range(2)]
            await job.deliver(generator, *pushed, partial=True)
            with generator.use() as held:
                exact.append(octets(expected) == octets(held.tensors))
    return exact


@pytest.mark.parametrize(
    "nccl", ["2.30.7", pytest.param("2.31.2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_holds_exactly_what_was_pushed(
    mode: Mode, nccl: str, processes: EmulatedProcesses
) -> None:
    # It refuses windows over each other, at other offsets, and puts beyond one.
    processes.nccl, processes.strict = nccl, True
    found = processes.start(_modes, mode).result()

    assert [True] * 5 == found


def _half(whole: Tensor, rank: int, *, columns: bool) -> weightsync.Shard:
    size = whole.shape[int(columns)] // 2
    data = whole.narrow(int(columns), rank * size, size).contiguous()
    offsets = (0, rank * size) if columns else (rank * size, 0)
    return weightsync.Shard(data, global_shape=tuple(whole.shape), offsets=offsets)


async def _layouts(control: Control, sent: bool, held: bool) -> list[bool]:
    """Two replicas, one in segments of its own size on each of its ranks."""
    names = [f"m{number}" for number in range(9)]
    wholes = {name: matrix(number) for number, name in enumerate(names)}
    single = on("cuda", 2, zeros(wholes))
    parts: list[dict[str, Any]] = []
    for rank in range(2):
        # The second rank has fewer tensors, and so fewer segments.
        mine = names if rank == 0 else names[:3]
        state = {name: _half(wholes[name] * 0, rank, columns=held) for name in mine}
        state |= {name: wholes[name] * 0 for name in names[3:] if rank == 1}
        parts.append(on("cuda", 3 + rank, state))
    for name in names[3:]:
        parts[0][name] = on("cuda", 3, {name: wholes[name] * 0})[name]
    del parts[1]["m8"]
    exact: list[bool] = []
    async with open_job(2, "cuda") as job:
        alone = await job.join_one(single, segment_bytes=2 * SEGMENT)
        pair = await job.join(*parts, segment_bytes=SEGMENT)
        for version in (1, 2):
            now = {name: whole + version for name, whole in wholes.items()}
            await job.push(
                *[
                    on(
                        "cuda",
                        rank,
                        {
                            name: _half(whole, rank, columns=sent)
                            for name, whole in now.items()
                        },
                    )
                    for rank in range(2)
                ]
            )
            await together(*[one.receive for one in [alone, *pair]])
            exact.append(octets(now) == octets(single))
            for rank, part in enumerate(parts):
                exact += [_is_exact(now, name, part, rank, held) for name in part]
    return exact


def _is_exact(
    now: Mapping[str, Tensor], name: str, part: Mapping[str, Any], rank: int, held: bool
) -> bool:
    found = part[name]
    if not isinstance(found, weightsync.Shard):
        return torch.equal(now[name], found.cpu())
    return torch.equal(_half(now[name], rank, columns=held).tensor, found.tensor.cpu())


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
    ids=["rows-to-columns", "columns-to-rows", "rows", "columns"],
)
def test_every_layout_arrives_exactly_though_ranks_differ_in_segments(
    sent: bool, held: bool, processes: EmulatedProcesses
) -> None:
    found = processes.start(_layouts, sent, held).result(60)

    assert [True] * len(found) == found
    assert 36 == len(found)


# Memory

MODEL = 12 * 8 * MIB
BUDGET = FEW + 8 * MIB


def taken(device: int) -> int:
    """Bytes of a GPU that are in use."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


async def _bounded(control: Control) -> list[Any]:
    """Push a model larger than the budget, again and again."""
    state = {f"w{i}": torch.full((8 * MIB,), i, dtype=torch.uint8) for i in range(12)}
    weights = on("cuda", 1, zeros(state))
    pushed = on("cuda", 0, state)
    before = taken(0)
    most: list[int] = []
    async with open_job(1, "cuda", staging_bytes=BUDGET) as job:
        generator = await job.join_one(weights, segment_bytes=8 * MIB)
        for _ in range(3):
            await job.deliver(generator, pushed)
            most.append(taken(0) - before)
    exact = [torch.equal(state[name], weights[name].cpu()) for name in state]
    del job, generator
    gc.collect()
    return [max(most), exact, taken(0) - before]


def test_a_trainer_takes_no_more_than_its_budget_however_large_the_model(
    processes: EmulatedProcesses,
) -> None:
    most, exact, left = processes.start(_bounded).result(60)
    # What the link takes itself, where its ranks meet.
    of_link = 2 * MIB

    assert [True] * 12 == exact
    assert BUDGET + of_link == most
    assert MODEL > most
    assert 0 == left


async def _too_little(control: Control) -> list[Any]:
    state = {f"w{i}": torch.zeros(2 * MIB, dtype=torch.uint8) for i in range(4)}
    weights = on("cuda", 2, state)
    pushed = [on("cuda", rank, state) for rank in range(2)]
    async with open_job(2, "cuda", staging_bytes=FEW) as job:
        refused = await job.enter(
            weightsync.Generator(job.address, weights, segment_bytes=4 * MIB)
        )
        waiting = [
            lambda trainer=trainer: trainer.wait_for_replicas(1, timeout=20)
            for trainer in job.trainers
        ]
        outcomes = await together(lambda: refused.receive(timeout=20), *waiting)
        outcomes += await job.outcomes(*pushed)
    named = re.findall(r"; staging_bytes=(\d+) would do", str(outcomes[0]))
    async with open_job(2, "cuda", staging_bytes=int(named[0])) as job:
        generator = await job.join_one(weights, segment_bytes=4 * MIB)
        update = (await job.deliver(generator, *pushed))[0]
    errors = [(type(one).__name__, str(one)) for one in outcomes]
    return [*errors, update.version]


def test_too_small_a_budget_is_an_error_that_names_what_would_do(
    processes: EmulatedProcesses,
) -> None:
    *errors, version = processes.start(_too_little).result(60)

    for _, error in errors:
        assert f"staging_bytes={FEW} is too little for this replica" in error
        assert f"; staging_bytes={FEW + 4 * MIB} would do" in error
    assert ["PeerError", *["PlanError"] * 4] == [name for name, _ in errors]
    assert 1 == version


FILLER = "mem_alloc@n=5:fail=1"
"""After three segments of a window, and chunks."""


async def _lacking(control: Control) -> list[Any]:
    """There is no memory for a filler; then for that, and later for a larger one."""
    sizes = {"large": 4 * MIB, "small": 2 * MIB - SEGMENT}
    state = {name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}
    weights = [on("cuda", number, zeros(state)) for number in (1, 2)]
    pushed = on("cuda", 0, state)
    async with open_job(1, "cuda", staging_bytes=FEW + 10 * MIB) as job:
        testing.inject(FILLER)
        first = weightsync.Generator(
            job.address, weights[0], replica="first", segment_bytes=4096
        )
        await job.enter(first)
        (refused,) = await together(lambda: first.receive(timeout=20))
        testing.inject("")
        (trainer,) = job.trainers

        async def push() -> None:
            await trainer.wait_for_replicas(1, timeout=20)
            await trainer.push(pushed, timeout=20)

        await together(push, lambda: first.receive(timeout=20))
        last = weightsync.Generator(
            job.address, weights[1], replica="last", segment_bytes=6 * MIB
        )
        await job.enter(last)
        await trainer.wait_for_replicas(2, timeout=20)
        updates = await job.deliver([first, last], pushed)
    exact = [
        torch.equal(value, each[name].cpu())
        for each in weights
        for name, value in state.items()
    ]
    return [str(refused), [update.version for update in updates], exact]


@pytest.mark.slow
def test_memory_that_was_not_there_counts_for_no_budget(
    processes: EmulatedProcesses,
) -> None:
    refused, versions, exact = processes.start(_lacking).result(60)

    assert f"NCCL has no {4 * MIB} bytes" in refused
    assert [2, 2] == versions
    assert [True] * 4 == exact


async def _nonsense(control: Control) -> list[str]:
    found: list[str] = []
    state = on("cuda", 0, {"w": torch.zeros(3)})
    for make in (
        lambda: weightsync.Trainer("tcp://127.0.0.1:0", staging_bytes=FEW - 1),
        lambda: weightsync.Generator("tcp://127.0.0.1:1", state, segment_bytes=4095),
    ):
        with pytest.raises(weightsync.PlanError) as raised:
            make()
        found.append(str(raised.value))
    return found


def test_sizes_that_cannot_be_are_refused_at_once(
    processes: EmulatedProcesses,
) -> None:
    staging, segment = processes.start(_nonsense).result()

    assert f"staging_bytes={FEW - 1} is too little: {FEW} are the least" == staging
    assert "segment_bytes=4095: 4096 are the least" == segment


# Deaths

NUMEL = 40 * MIB


def _generator(processes: EmulatedProcesses, address: str, name: str) -> Child:
    arguments = (address, name, 0, 1, NUMEL, "staged", 10.0, "cuda", SEGMENT)
    child = processes.start(driven.generator, *arguments, name=name)

    assert child.hear() == "open"
    return child


def _trainer(processes: EmulatedProcesses, address: str, faults: str = "") -> Child:
    before, processes.faults = processes.faults, faults
    arguments = (address, 0, 1, NUMEL, 10.0, "cuda")
    child = processes.start(driven.trainer, *arguments, name="trainer")
    processes.faults = before

    assert child.hear() == "open"
    return child


def test_segments_behind_a_network_are_filled_exactly(
    processes: EmulatedProcesses, address: str
) -> None:
    processes.faults, processes.strict = "network=0-1", True
    trainer = _trainer(processes, address, "network=0-1")
    generator = _generator(processes, address, "gen-0")
    assert call(trainer, "wait_for_replicas", count=1, timeout=15).kind == "ok"
    for version in (1, 2):
        ask(generator, "receive", timeout=15)
        call(trainer, "push", version=version, timeout=10)
        assert "ok" == generator.hear().kind

        assert Held(version, version) == call(generator, "held").value
    assert driven.close(generator, trainer) < 10


@pytest.mark.parametrize("number", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_trainer_that_dies_between_segments_leaves_the_old_version(
    number: int, processes: EmulatedProcesses, address: str
) -> None:
    trainer = _trainer(processes, address, f"put@n={number}:kill")
    generator = _generator(processes, address, "gen-0")
    assert call(trainer, "wait_for_replicas", count=1, timeout=15).kind == "ok"
    ask(generator, "receive", timeout=15)
    ask(trainer, "push", version=1, timeout=5)
    trainer.join()
    received = generator.hear()

    assert "PeerError" == received.kind, received
    assert Held(None, SENTINEL) == call(generator, "held").value
    assert driven.close(generator) < 5


def test_a_generator_that_dies_in_a_push_fails_alone(
    processes: EmulatedProcesses, address: str
) -> None:
    trainer = _trainer(processes, address)
    dies = _generator(processes, address, "gen-0")
    stays = _generator(processes, address, "gen-1")
    assert call(trainer, "wait_for_replicas", count=2, timeout=15).kind == "ok"
    call(dies, "kill_at_first_byte", pid=dies.pid, number=9)
    ask(stays, "receive", timeout=15)
    pushed = call(trainer, "push", version=1, timeout=5)

    assert "ok" == stays.hear().kind
    assert ("gen-1",) == pushed.value.delivered
    assert {"gen-0"} == set(pushed.value.failed)
    assert Held(1, 1) == call(stays, "held").value
    assert driven.close(stays, trainer) < 10
