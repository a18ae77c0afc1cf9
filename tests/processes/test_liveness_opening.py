"""An opening that is cancelled just when it succeeds: nothing of it may stay open."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
import torch

import weightsync
from tests.processes.harness import free_address
from weightsync.engine import ShmEngine
from weightsync.link import GeneratorLink

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 20.0
SLOW_SECONDS = 2.0


async def _cancelled_late(
    transport: weightsync.Generator, until: Callable[[], bool]
) -> float:
    """Enter a transport and cancel that when it has succeeded, which is not seen yet.

    For this loop is blocked meanwhile; that of the transport is not. Return the seconds
    that it then takes.
    """
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(transport.__aenter__)
            for _ in range(2):  # it has begun then
                await anyio.lowlevel.checkpoint()
            deadline = time.monotonic() + SECONDS
            while not until():
                assert time.monotonic() < deadline
                time.sleep(0.005)  # noqa: ASYNC251 -- it is to block.
            time.sleep(0.2)  # noqa: ASYNC251 -- it is to block.
            scope.cancel()
            started = time.monotonic()
    return time.monotonic() - started


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_replica_whose_opening_is_cancelled_as_it_succeeds_leaves_the_pool(
    backend: str,
) -> None:
    async def main() -> list[str]:
        address = free_address()
        async with weightsync.Trainer(address, timeout=SECONDS) as trainer:
            generator = weightsync.Generator(
                address, {"w": torch.zeros(4)}, replica="gen", timeout=SECONDS
            )
            await _cancelled_late(generator, lambda: trainer.replicas == ("gen",))
            events = trainer.events(after=0)
            with anyio.fail_after(SECONDS):
                found = [await anext(events) for _ in range(3)]
            return [event.kind for event in found if event.name == "gen"]

    assert ["joined", "left"] == anyio.run(main, backend=backend)


@pytest.mark.parametrize("engine", ["shm"], indirect=True)
@pytest.mark.asyncio
async def test_such_a_replica_gives_up_a_link_that_nobody_else_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    forming, given_up = threading.Event(), threading.Event()

    def join(*_: object) -> None:
        """Wait as for trainers that are gone, of which nobody has told."""
        forming.set()
        given_up.wait(SECONDS)
        raise weightsync.ClosedError("given up")

    monkeypatch.setattr(GeneratorLink, "join", join)
    monkeypatch.setattr(GeneratorLink, "abort", lambda _: given_up.set())
    async with weightsync.Trainer(address, timeout=SECONDS):
        generator = weightsync.Generator(
            address, {"w": torch.zeros(4)}, replica="gen", timeout=SECONDS
        )
        seconds = await _cancelled_late(generator, forming.is_set)

    assert seconds < 3.0


@pytest.fixture
def slow_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a link take long to be made, as where a name server does not answer."""
    make = ShmEngine.group

    def group(engine: ShmEngine, *, first: bool) -> object:
        """Make it late."""
        time.sleep(SLOW_SECONDS)
        return make(engine, first=first)

    monkeypatch.setattr(ShmEngine, "group", group)


@pytest.mark.usefixtures("slow_to_meet")
@pytest.mark.parametrize("engine", ["shm"], indirect=True)
@pytest.mark.asyncio
async def test_trainers_answer_while_a_link_is_made() -> None:
    address = free_address()
    asked = 0
    async with weightsync.Trainer(address, timeout=SECONDS) as trainer:
        async with weightsync.Generator(
            address, {"w": torch.zeros(4)}, replica="gen", timeout=SECONDS
        ):
            while trainer.replicas != ("gen",):
                await trainer.membership(timeout=SLOW_SECONDS / 2)
                asked += 1
                await anyio.sleep(0.05)

    assert asked >= 5


@pytest.mark.usefixtures("slow_to_meet")
@pytest.mark.parametrize("engine", ["shm"], indirect=True)
@pytest.mark.asyncio
async def test_an_opening_is_cancelled_at_once_while_a_link_is_made() -> None:
    address = free_address()
    async with weightsync.Trainer(address, timeout=SECONDS):
        generator = weightsync.Generator(
            address, {"w": torch.zeros(4)}, replica="gen", timeout=SECONDS
        )
        started = anyio.current_time()
        with anyio.move_on_after(0.1):
            await generator.__aenter__()
        seconds = anyio.current_time() - started

    assert seconds < SLOW_SECONDS / 2
