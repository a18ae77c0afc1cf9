"""The same job on every engine: what arrives, in which layouts, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import (
    MODES,
    Job,
    Mode,
    on,
    open_job,
    raw,
    receive_all,
    until_pending,
)
from tests.processes.test_exact_dtypes import odd_sizes
from weightsync.packing import PUT_BYTES
from weightsync.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tests.processes.engines import Engine
    from tests.processes.harness import Control, Processes

Cut = tuple[int, int]
"""Into how many parts a matrix is cut, by rows and by columns."""


def every_dtype() -> dict[str, Tensor]:
    """All bytes in every dtype that can be moved."""
    patterns = torch.arange(256, dtype=torch.uint8).repeat(16)
    known = [name for name in ITEMSIZE if hasattr(torch, name)]
    return {name: patterns.view(getattr(torch, name)) for name in known}


def zeros_like(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros by their bytes, for not every dtype has a zero of its own."""
    return {
        name: torch.zeros(tensor.nbytes, dtype=torch.uint8)
        .view(tensor.dtype)
        .view(tensor.shape)
        for name, tensor in state.items()
    }


def octets(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The bytes of all tensors, or of all shards."""
    return {name: bytes(raw(tensor.cpu())) for name, tensor in state.items()}


# Dtypes


async def _dtypes(control: Control, device: str, trainers: int) -> bool:
    source = {**odd_sizes(), **every_dtype()}
    weights = on(device, trainers, zeros_like(source))
    async with open_job(trainers, device) as job:
        generator = await job.join_one(weights)
        pushed = [on(device, rank, source) for rank in range(trainers)]
        (update,) = await job.deliver(generator, *pushed)
    exact = octets(source) == octets(weights)
    unchanged = all(octets(source) == octets(state) for state in pushed)
    nbytes = sum(tensor.nbytes for tensor in source.values())
    return exact and unchanged and nbytes == update.nbytes


@pytest.mark.parametrize("trainers", [1, 2])
def test_every_dtype_arrives_with_identical_bytes(
    trainers: int, engine: Engine, processes: Processes
) -> None:
    child = processes.start(_dtypes, engine.device, trainers)

    assert child.result()


# Layouts


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)


def _shard(whole: Tensor, cut: Cut, part: int) -> weightsync.Shard:
    """Return a part of a matrix, in parts that may differ in size by one."""
    rows, columns = cut
    row, column = divmod(part, columns)
    top, bottom = (whole.shape[0] * (row + i) // rows for i in (0, 1))
    left, right = (whole.shape[1] * (column + i) // columns for i in (0, 1))
    data = whole[top:bottom, left:right].contiguous()
    return weightsync.Shard(data, global_shape=tuple(whole.shape), offsets=(top, left))


async def _layouts(
    control: Control, device: str, shape: Cut, sent: Cut, held: Cut
) -> list[bool]:
    """Push parts of one matrix twice to a whole replica and to one of two parts."""
    whole = _matrix(*shape)
    small = torch.arange(5.0)
    count = sent[0] * sent[1]
    one = on(device, count, zeros_like({"m": whole, "small": small}))
    two = []
    for rank in range(2):
        empty = _shard(torch.zeros_like(whole), held, rank)
        two.append(on(device, count + rank, {"m": empty, "small": small * 0}))
    exact: list[bool] = []
    async with open_job(count, device) as job:
        single = await job.join_one(one)
        pair = await job.join(*two)
        for version in (1, 2):
            now = whole + version
            parts = [
                {"m": _shard(now, sent, part), "small": small} for part in range(count)
            ]
            pushed = [on(device, rank, part) for rank, part in enumerate(parts)]
            await job.push(*pushed)
            await receive_all([single, *pair])
            found = [one["m"], *[shards["m"].tensor for shards in two]]
            parts = [_shard(now, held, rank).tensor for rank in range(2)]
            exact += [
                torch.equal(*both)
                for both in zip([now, *parts], map(_host, found), strict=True)
            ]
            exact += [torch.equal(small, _host(one["small"]))]
    return exact


def _host(tensor: Tensor) -> Tensor:
    return tensor.cpu()


WIDE = (3, PUT_BYTES // 4 + 1000)
"""Rows of which one is larger than a put may be."""
TALL = (PUT_BYTES // 256 + 7, 160)
"""Many rows, and more of them than fit into one put."""

LAYOUTS = {
    "rows to columns": ((64, 48), (2, 1), (1, 2)),
    "columns to rows": ((64, 48), (1, 2), (2, 1)),
    "uneven rows to columns": ((7, 5), (2, 1), (1, 2)),
    "a grid to rows": ((33, 31), (2, 2), (2, 1)),
    "wide rows, whole to columns": (WIDE, (1, 1), (1, 2)),
    "wide rows, columns to rows": (WIDE, (1, 2), (2, 1)),
    "many rows, rows to columns": (TALL, (2, 1), (1, 2)),
    "many rows, columns to rows": (TALL, (1, 2), (2, 1)),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_arrives_exactly(
    case: str, engine: Engine, processes: Processes
) -> None:
    child = processes.start(_layouts, engine.device, *LAYOUTS[case])

    assert [True] * 8 == child.result(60)


# Versions


async def _versions(control: Control, device: str) -> list[Any]:
    weights = on(device, 2, {"w": torch.zeros(8)})
    found: list[Any] = []

    def full(value: float) -> list[dict[str, Any]]:
        state = {"w": torch.full((8,), value)}
        return [on(device, rank, state) for rank in range(2)]

    async with open_job(2, device) as job:
        generator = await job.join_one(weights)
        for given in (None, None, 10, None):
            reports = await job.push(*full(1.0), version=given)
            update = await generator.receive(timeout=10)
            found.append([reports[0].version, reports[1].version, update.version])
        refused = await job.outcomes(*full(2.0), version=11)
        found.append([type(error).__name__ for error in refused])
        await job.push(*full(3.0))
        skipped = await job.push(*full(4.0), on_busy="skip")
        found.append(skipped[0].skipped)
        late = await job.outcomes(*full(5.0), timeout=0.5)
        found.append([type(error).__name__ for error in late])
        await until_pending(generator, 12)
        update = await generator.receive(timeout=10)
        found.append([update.version, weights["w"].cpu().tolist()])
        await job.push(*full(6.0))
        update = await generator.receive(timeout=10)
        found.append([update.version, weights["w"].cpu().tolist()])
    return found


def test_versions_increase_and_a_busy_replica_keeps_its_own(
    engine: Engine, processes: Processes
) -> None:
    found = processes.start(_versions, engine.device).result()

    assert [[v, v, v] for v in (1, 2, 10, 11)] == found[:4]
    assert ["PlanError"] * 2 == found[4]
    assert ("gen-0",) == found[5]
    assert ["TimedOutError"] * 2 == found[6]
    assert [12, [3.0] * 8] == found[7]
    assert 6.0 == found[8][1][0]


async def _sources(control: Control, device: str) -> list[float]:
    """Change the source as soon as a push has returned, again and again."""
    source = on(device, 0, {"w": torch.zeros(1 << 20)})
    weights = on(device, 1, {"w": torch.zeros(1 << 20)})
    found = []
    async with open_job(1, device) as job:
        generator = await job.join_one(weights)
        source["w"].copy_(torch.full((1 << 20,), 1.0))
        for version in range(1, 20):
            await job.push(source)
            source["w"].copy_(torch.full((1 << 20,), version + 1.0))
            await generator.receive(timeout=10)
            values = set(weights["w"].cpu().tolist())
            found.append(values.pop() if len(values) == 1 else -1.0)
    return found


def test_a_source_may_change_as_soon_as_push_has_returned(
    engine: Engine, processes: Processes
) -> None:
    found = processes.start(_sources, engine.device).result()

    assert [float(version) for version in range(1, 20)] == found


def _values(tensor: Tensor) -> set[int]:
    """The one value of all elements; two of several."""
    host = tensor.cpu()
    other = host[host != host[0]][:1]
    return {int(host[0]), *other.tolist()}


async def _cancelled(control: Control, device: str) -> list[Any]:
    """Give a push up in the middle; the next one must find every signal taken."""
    size = 32 << 20
    source = on(device, 0, {"w": torch.zeros(size, dtype=torch.uint8)})
    weights = on(device, 1, {"w": torch.zeros(size, dtype=torch.uint8)})
    found: list[Any] = []
    async with open_job(1, device) as job:
        generator = await job.join_one(weights)
        for version in range(1, 6):
            source["w"].copy_(torch.full((size,), version, dtype=torch.uint8))
            with anyio.move_on_after(0.002 * version):
                await job.push(source)
            source["w"].copy_(torch.full((size,), 255, dtype=torch.uint8))
            if generator.pending is not None:
                await generator.receive(timeout=10)
            found.append(_values(weights["w"]))
        await _receive_pending(job, generator)
        await job.push(source)
        await generator.receive(timeout=10)
        found.append(_values(weights["w"]))
    return found


async def _receive_pending(job: Job, generator: weightsync.Generator) -> None:
    await anyio.sleep(0.2)  # until what was whole before a cancellation is told here
    if generator.pending is not None:
        await generator.receive(timeout=10)


def test_a_push_that_is_given_up_leaves_one_whole_version_and_no_signal(
    engine: Engine, processes: Processes
) -> None:
    found = processes.start(_cancelled, engine.device).result()

    assert all(len(values) == 1 for values in found)
    assert {255} == found[-1]
    assert all(values <= {0, 1, 2, 3, 4, 5} for values in found[:-1])


# Modes


async def _modes(control: Control, device: str, mode: Mode) -> list[list[float]]:
    """Push all of it and parts of it in turn, and read what is held after each."""

    def full(value: float) -> dict[str, Tensor]:
        kept = torch.full((3, 5), value)
        return {"kept": kept, "pushed": torch.full((1000,), value)}

    weights = on(device, 2, full(0.0))
    found: list[list[float]] = []
    async with open_job(2, device) as job:
        generator = await job.join_one(weights, mode=mode)
        for version in range(1, 7):
            state = full(float(version))
            if version % 2 == 0:
                del state["kept"]
            states = [on(device, rank, state) for rank in range(2)]
            await job.deliver(generator, *states, partial=True)
            with generator.use() as held:
                values = [
                    set(held.tensors[name].cpu().view(-1).tolist())
                    for name in full(0.0)
                ]
            found.append([value for each in values for value in sorted(each)])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_holds_what_was_pushed_last(
    mode: Mode, engine: Engine, processes: Processes
) -> None:
    found = processes.start(_modes, engine.device, mode).result()

    assert [[1, 1], [1, 2], [3, 3], [3, 4], [5, 5], [5, 6]] == found
