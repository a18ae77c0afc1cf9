"""Puts straight from the caller's tensors: what arrives, and what that calls.

What goes wrong meanwhile is in test_straight_faults.py.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes.driven import MIB
from tests.processes.rig import MODES, SECONDS, Job, Mode, on, raw, together
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from torch import Tensor

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.harness import Control

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.emulated(strict=True),
    pytest.mark.timeout(60),
    pytest.mark.anyio,
]

SEGMENT = 1 << 16
"""Bytes: small, so that there are many segments, and puts end where they do."""

ROWS, COLUMNS = 96, 128
"""Of a matrix of int32: three quarters of a segment."""


def matrix(start: int) -> Tensor:
    return torch.arange(start, start + ROWS * COLUMNS, dtype=torch.int32).view(
        ROWS, COLUMNS
    )


def model(version: int) -> dict[str, Tensor]:
    """Tensors smaller than a segment, about as large, and larger; none aligned."""
    sizes = {"small": 33, "bias": 1, "large": 3 * SEGMENT + 5, "none": 0}
    found = {
        name: torch.arange(size).add(version).to(torch.uint8)
        for name, size in sizes.items()
    }
    found |= {f"m{number}": matrix(version + number) for number in range(3)}
    return {**found, "last": torch.full((7,), version, dtype=torch.bfloat16)}


def half(whole: Tensor, rank: int, *, columns: bool) -> weightsync.Shard:
    size = whole.shape[int(columns)] // 2
    data = whole.narrow(int(columns), rank * size, size).contiguous()
    offsets = (0, rank * size) if columns else (rank * size, 0)
    return weightsync.Shard(data, global_shape=tuple(whole.shape), offsets=offsets)


def cut(state: Mapping[str, Tensor], rank: int, how: str) -> dict[str, Any]:
    """What one of two ranks has: halves of the matrices, and all of the others."""
    if how == "whole":
        return dict(state)
    return {
        name: half(value, rank, columns=how == "columns") if value.dim() == 2 else value
        for name, value in state.items()
    }


def local(value: Any) -> Tensor:
    found: Tensor = value.tensor if isinstance(value, weightsync.Shard) else value
    return found


def octets(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(raw(local(value).cpu())) for name, value in state.items()}


def registered(number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same in memory of NCCL on this GPU."""
    with weightsync.nccl_memory(number):
        return on("cuda", number, state)


def fill(held: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Change the values, and not where they lie."""
    for name, value in state.items():
        local(held[name]).copy_(local(value))


@asynccontextmanager
async def open_straight(
    *memory: Mapping[str, Any], device: str = "cuda", **options: Any
) -> AsyncGenerator[Job]:
    """Open trainer ranks that put straight, each on a GPU of its own if on GPUs."""
    async with AsyncExitStack() as stack:
        job = Job(stack)
        address = "tcp://127.0.0.1:0"
        for rank, state in enumerate(memory):
            if device == "cuda":
                torch.cuda.set_device(rank)
            given: dict[str, Any] = {"staging": "none", "memory": state, **options}
            trainer = weightsync.Trainer(
                address,
                rank=rank,
                world_size=len(memory),
                timeout=SECONDS,
                **given,
            )
            job.trainers.append(await job.enter(trainer))
            address = job.address
        yield job


# What arrives


async def _layouts(control: Control, sent: str, held: str, mode: Mode) -> list[bool]:
    """Push three versions, and change the tensors as soon as each push has returned."""
    pushed = [registered(rank, cut(model(0), rank, sent)) for rank in range(2)]
    zero = {name: torch.zeros_like(value) for name, value in model(0).items()}
    weights = [on("cuda", 2 + rank, cut(zero, rank, held)) for rank in range(2)]
    exact: list[bool] = []
    async with open_straight(*pushed) as job:
        generators = await job.join(*weights, mode=mode, segment_bytes=SEGMENT)
        for version in (1, 2, 3):
            for rank, state in enumerate(pushed):
                fill(state, cut(model(version), rank, sent))
            _, updates = await together(
                lambda: job.push(*pushed), lambda: receive(generators)
            )
            for rank, state in enumerate(pushed):
                fill(state, cut(model(100), rank, sent))
            expected = [octets(cut(model(version), rank, held)) for rank in range(2)]
            exact.append([version] * 2 == updates)
            exact += [expected[rank] == octets(weights[rank]) for rank in range(2)]
    return exact


async def receive(generators: list[weightsync.Generator]) -> list[int]:
    return [
        update.version for update in await together(*[g.receive for g in generators])
    ]


KINDS = ("rows", "columns", "whole")
NCCL = ("2.30.7", "2.31.2", "2.32.3")
LAYOUTS = [
    (sent, held, mode, NCCL[number % len(NCCL)])
    for number, (sent, held, mode) in enumerate(product(KINDS, KINDS, MODES))
]
QUICK = {("rows", "columns", "staged"), ("columns", "rows", "inplace")}


@pytest.mark.parametrize(
    ("sent", "held", "mode", "nccl"),
    [
        pytest.param(*one, marks=() if one[:3] in QUICK else pytest.mark.slow)
        for one in LAYOUTS
    ],
)
def test_every_layout_arrives_exactly_from_where_it_lies(
    sent: str, held: str, mode: Mode, nccl: str, processes: EmulatedProcesses
) -> None:
    processes.nccl = nccl
    found = processes.start(_layouts, sent, held, mode).result(60)

    assert [True] * 9 == found


async def _uneven(control: Control) -> list[bool]:
    """Ranks with several allocations, one and none, and two links over them."""
    expected = {f"w{i}": torch.full((70,), i, dtype=torch.uint8) for i in range(4)}
    names = [list(expected)[:3], list(expected)[3:], []]
    pushed: list[dict[str, Any]] = [{}, {}, {}]
    for rank, mine in enumerate(names):
        for name in mine:  # an allocation each, for each is in a pool of its own
            pushed[rank] |= registered(rank, {name: expected[name]})
    zeros = {name: torch.zeros_like(value) for name, value in expected.items()}
    weights = [on("cuda", 3 + rank, zeros) for rank in range(2)]
    async with open_straight(*pushed) as job:
        first = await job.join_one(weights[0])
        await job.deliver(first, *pushed)
        second = await job.join_one(weights[1])
        await job.deliver([first, second], *pushed)
        windows = testing.calls()["ncclCommWindowRegister"]
    exact = [octets(expected) == octets(held) for held in weights]
    # For each rank of a link one of the window, and one of each allocation of the rank
    # that has most of them.
    return [*exact, windows == 2 * 4 * (1 + 3)]


def test_ranks_may_have_any_number_of_allocations(
    processes: EmulatedProcesses,
) -> None:
    found = processes.start(_uneven).result(60)

    assert [True] * 3 == found


async def _joins_later(control: Control) -> list[bool]:
    """A replica that joins gets what was pushed last, which is kept on the host."""
    pushed = registered(0, model(0))
    zeros = {name: torch.zeros_like(value) for name, value in model(0).items()}
    weights = [on("cuda", 1 + rank, zeros) for rank in range(2)]
    exact: list[bool] = []
    async with open_straight(pushed, replay=True) as job:
        first = await job.join_one(weights[0], segment_bytes=SEGMENT)
        fill(pushed, model(1))
        await job.deliver(first, pushed)
        fill(pushed, model(100))
        second = await job.join_one(weights[1], segment_bytes=SEGMENT)
        update = await second.receive(timeout=SECONDS)
        exact += [update.version == 1, octets(model(1)) == octets(weights[1])]
        fill(pushed, model(2))
        await job.deliver([first, second], pushed)
        exact += [octets(model(2)) == octets(held) for held in weights]
    return exact


def test_a_replay_goes_through_chunks(processes: EmulatedProcesses) -> None:
    found = processes.start(_joins_later).result(60)

    assert [True] * 4 == found


async def _after_the_stream(control: Control) -> bool:
    """Push what the caller's stream has still to copy; in the first push it has not."""
    size, copies = 8 * MIB, 100
    pushed = registered(0, {"w": torch.zeros(size, dtype=torch.uint8)})
    weights = on("cuda", 1, {"w": torch.zeros(size, dtype=torch.uint8)})
    early, late = (torch.full((size,), value, dtype=torch.uint8) for value in (3, 7))
    values = [early.pin_memory()] * copies + [late.pin_memory()]
    stream = torch.cuda.Stream(0)  # type: ignore[no-untyped-call] # of torch
    async with open_straight(pushed) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, pushed)
        with torch.cuda.device(0), torch.cuda.stream(stream):
            for value in values:
                pushed["w"].copy_(value, non_blocking=True)
            await job.deliver(generator, pushed)
    return bool((weights["w"].cpu() == 7).all())


def test_puts_come_after_what_the_callers_stream_was_given(
    processes: EmulatedProcesses,
) -> None:
    assert processes.start(_after_the_stream).result(60)


async def test_over_shared_memory_nothing_is_staged_in_any_case() -> None:
    pushed = {"w": torch.arange(6).view(2, 3), "b": torch.ones(3)}
    weights = {name: torch.zeros_like(value) for name, value in pushed.items()}
    async with open_straight(pushed, device="cpu") as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, {**pushed, "w": pushed["w"].clone()})

    assert octets(pushed) == octets(weights)


# What it calls

PUSHES = 5
COPIES = ("cudaMemcpyAsync", "cudaMemcpy2DAsync")
NEW = ("MemAlloc", "Malloc", "HostAlloc", "StreamCreate", "Register", "CommInit")
"""Parts of the names of what makes something: memory, streams, windows, groups."""


def counted(names: tuple[str, ...]) -> int:
    """Calls until now of functions whose names have one of these parts."""
    found = testing.calls()
    return sum(found[name] for name in found if any(part in name for part in names))


async def _push_often(control: Control, straight: bool) -> Any:
    """Push halves of rows to halves of rows, which are in two ranks on both sides."""
    state = {"m": matrix(0), "v": torch.arange(3 * SEGMENT, dtype=torch.uint8)}
    pushed = [registered(rank, cut(state, rank, "rows")) for rank in range(2)]
    weights = [on("cuda", 2 + rank, cut(state, rank, "rows")) for rank in range(2)]
    options: dict[str, Any] = {} if straight else {"staging": "copy", "memory": None}
    new: list[int] = []
    copies: list[int] = []
    async with open_straight(*pushed, **options) as job:
        generators = await job.join(*weights, mode="inplace", segment_bytes=SEGMENT)
        for _ in range(PUSHES):
            before = counted(COPIES)
            await job.deliver(generators, *pushed)
            copies.append(counted(COPIES) - before)
            new.append(counted(NEW))
        windows = testing.calls()["ncclCommWindowRegister"]
    return copies[-1], new[-1] - new[0], windows


def test_a_push_copies_nothing_but_headers_and_makes_nothing(
    processes: EmulatedProcesses,
) -> None:
    copies, new, windows = processes.start(_push_often, True).result(60)
    staged, _, before = processes.start(_push_often, False).result(60)

    headers, pieces, ranks, allocations = 3 + 2, 4, 4, 1

    assert 0 == new
    assert (headers, headers + pieces) == (copies, staged)
    assert windows == before + ranks * allocations
