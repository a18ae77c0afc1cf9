"""How receive behaves while its generator joins again: timeouts, cancelling, leases."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes.harness import free_address
from tests.processes.rig import SECONDS, receive_all, together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.processes.rig import Mode

RANKS = 2


def full(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value, dtype=torch.float32)}


@asynccontextmanager
async def _trainer(address: str) -> AsyncIterator[weightsync.Trainer]:
    async with weightsync.Trainer(
        address, rank=0, world_size=1, timeout=SECONDS
    ) as trainer:
        yield trainer


async def _deliver(
    trainer: weightsync.Trainer, generators: list[weightsync.Generator], value: float
) -> list[int]:
    """Push and receive at the same time; return the versions received."""

    async def push() -> None:
        await trainer.wait_for_replicas(1, timeout=SECONDS)
        await trainer.push(full(value), timeout=SECONDS)

    _, received = await together(push, lambda: receive_all(generators))
    return [update.version for update in received]


@asynccontextmanager
async def _left(
    mode: Mode, ranks: int = 1
) -> AsyncIterator[tuple[str, list[weightsync.Generator]]]:
    """A replica that has received version 1, and was told that its trainer is gone."""
    address = free_address()
    generators = [
        weightsync.Generator(
            address,
            full(-777.0),
            replica="g",
            rank=rank,
            world_size=ranks,
            mode=mode,
            timeout=SECONDS,
        )
        for rank in range(ranks)
    ]
    async with _trainer(address) as trainer:
        await together(*[generator.__aenter__ for generator in generators])
        assert [1] * ranks == await _deliver(trainer, generators, 1.0)
    ends = await receive_all(generators)
    assert [weightsync.ClosedError] * ranks == [type(end) for end in ends]
    try:
        yield address, generators
    finally:
        await together(*[generator.aclose for generator in generators])


def _open() -> tuple[int, int, int]:
    """Descriptors, memory of ranks, and threads of transports."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    segments = Path("/proc/self/maps").read_text().count("memfd:weightsync ")
    return len(os.listdir("/proc/self/fd")), segments, len(names)


async def _settled(expected: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is open, once that is no more than expected."""
    with anyio.move_on_after(10):
        while any(now > then for now, then in zip(_open(), expected, strict=True)):
            await anyio.sleep(0.02)
    return _open()


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["staged", "swap", "inplace"])
async def test_attempts_that_are_given_up_leave_nothing_behind(mode: Mode) -> None:
    async with _left(mode, RANKS) as (address, generators):
        await receive_all(generators, timeout=0.2)
        before = _open()
        timed_out = await receive_all(generators, timeout=0.2)
        for seconds in (0.0, 0.05, 0.3):
            with anyio.move_on_after(seconds):
                await receive_all(generators)
        after = await _settled(before)
        async with _trainer(address) as trainer:
            versions = await _deliver(trainer, generators, 2.0)

    assert [weightsync.TimedOutError] * RANKS == [type(end) for end in timed_out]
    assert all(now <= then for now, then in zip(after, before, strict=True))
    assert [2] * RANKS == versions


@pytest.mark.anyio
async def test_an_iteration_ends_with_the_trainers_and_can_be_begun_again() -> None:
    async with _left("staged") as (address, (generator,)):
        seen: list[int] = []

        async def iterate() -> None:
            seen.extend([update.version async for update in generator])

        for value in (2.0, 3.0):

            async def train(value: float = value) -> None:
                async with _trainer(address) as trainer:
                    await trainer.wait_for_replicas(1, timeout=SECONDS)
                    await trainer.push(full(value), timeout=SECONDS)

            with anyio.fail_after(SECONDS):
                await together(iterate, train)

    assert [2, 3] == seen


@pytest.mark.anyio
async def test_closing_ends_an_attempt_to_join_again() -> None:
    async with _left("staged", RANKS) as (_, generators):
        started = anyio.current_time()

        async def close() -> None:
            await anyio.sleep(0.2)
            await together(*[generator.aclose for generator in generators])

        received, _ = await together(lambda: receive_all(generators), close)
        seconds = anyio.current_time() - started

    assert [weightsync.ClosedError] * RANKS == [type(end) for end in received]
    assert seconds < 5.0


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["swap", "inplace"])
async def test_tensors_move_into_new_memory_when_no_lease_is_held(mode: Mode) -> None:
    async with _left(mode) as (address, (generator,)), _trainer(address) as trainer:
        with generator.use() as weights:
            before = weights.tensors["w"].data_ptr()
            outcome = (await receive_all([generator], timeout=1.0))[0]
            kept = weights.tensors["w"].data_ptr(), weights.tensors["w"].tolist()
        versions = await _deliver(trainer, [generator], 2.0)
        with generator.use() as weights:
            after = weights.tensors["w"].data_ptr()
            held = weights.version, weights.tensors["w"].tolist()

    assert isinstance(outcome, weightsync.TimedOutError)
    assert (before, [1.0] * 8) == kept
    assert [2] == versions
    assert before != after
    assert (2, [2.0] * 8) == held
