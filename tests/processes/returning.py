"""Trainers and generators of which one side goes and comes back, driven by a test."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio
import torch

import weightsync
from tests.processes.driven import SENTINEL, Outcome, ask, census, resident_mib, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.processes.harness import Child, Control, Processes
    from tests.processes.rig import Mode

MODES: tuple[Mode, ...] = ("staged", "swap", "inplace")
SECONDS = 20.0


class Seen(NamedTuple):
    """What a generator rank holds: read under a lease, with the value of all bytes."""

    version: int | None
    epoch: int
    value: int | None


class Counted(NamedTuple):
    """What a process has open, mapped memory of ranks, and what it occupies."""

    descriptors: int
    segments: int
    mib: float


SLACK = Counted(descriptors=2, segments=0, mib=16)


async def trainer(  # noqa: PLR0917 -- arguments of a process are positional
    control: Control,
    address: str,
    rank: int,
    world_size: int,
    numel: int,
    epoch: int | None = None,
    lease: float = 10.0,
) -> None:
    """A trainer rank that pushes its part of ``w``, every byte of it one value."""
    part = numel // world_size
    source = torch.zeros(part, dtype=torch.uint8).to(control.device)
    shard = weightsync.Shard(source, global_shape=(numel,), offsets=(rank * part,))

    async def push(value: int, **options: Any) -> Any:
        source.copy_(torch.full((part,), value, dtype=torch.uint8))
        return await transport.push({"w": shard}, **options)

    async def event(kind: str) -> str:
        async for event in transport.events(after=0):
            if event.kind == kind:
                return str(event)
        return "no event"

    async def last_event() -> str:
        return [str(event) async for event in _so_far(transport)][-1]

    async with weightsync.Trainer(
        address, rank=rank, world_size=world_size, timeout=20, epoch=epoch, lease=lease
    ) as transport:
        control.say("open")
        calls = {
            "push": push,
            "event": event,
            "last_event": last_event,
            "membership": transport.membership,
            "wait_for_replicas": transport.wait_for_replicas,
        }
        await serve(control, calls)


async def _so_far(transport: weightsync.Trainer) -> Any:
    """Iterate over the events until now."""
    number = (await transport.membership()).number
    async for event in transport.events(after=0):
        yield event
        if event.number >= number:
            return


async def generator(  # noqa: PLR0917 -- arguments of a process are positional
    control: Control,
    address: str,
    replica: str,
    rank: int,
    world_size: int,
    numel: int,
    mode: Literal["staged", "swap", "inplace"] = "staged",
    lease: float = 10.0,
) -> None:
    """A generator rank that holds ``w``."""
    weight = torch.full((numel,), SENTINEL, dtype=torch.uint8).to(control.device)

    async def receive(**options: Any) -> weightsync.Update:
        return await transport.receive(**options)

    async def see() -> Seen:
        with transport.use() as weights:
            found = weight.cpu()
            uniform = bool((found == found[0]).all())
            value = int(found[0]) if uniform else None
            return Seen(weights.version, weights.epoch, value)

    stopped: list[bool] = []
    watching: list[threading.Thread] = []

    async def strike_at_first_byte(
        value: int, pids: list[int], number: signal.Signals
    ) -> None:
        """Signal processes when a byte of this value has come into the window."""
        stopped.clear()
        watched = _Watched(transport, value)
        watch = partial(_strike_in_a_put, watched, pids, number, stopped)
        watching[:] = [threading.Thread(target=watch, daemon=True)]
        watching[0].start()

    async def in_time() -> bool:
        """Whether that was before the last byte came; else they go on."""
        await anyio.to_thread.run_sync(watching[0].join, SECONDS)
        return stopped == [True]

    async def count() -> Counted:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        segments = maps.count("memfd:weightsync ")
        return Counted(census().descriptors, segments, resident_mib())

    async with weightsync.Generator(
        address,
        {"w": weight},
        replica=replica,
        rank=rank,
        world_size=world_size,
        mode=mode,
        timeout=20,
        lease=lease,
    ) as transport:
        control.say("open")
        calls = {
            "receive": receive,
            "see": see,
            "count": count,
            "strike_at_first_byte": strike_at_first_byte,
            "in_time": in_time,
        }
        await serve(control, calls)


class _Watched:
    """The window of a generator rank while it is written, when nobody else may read."""

    def __init__(self, transport: weightsync.Generator, value: int) -> None:
        session: Any = transport._core.session
        slots = session._member.slots
        self._memory = session._joining.rank._settled.memory
        self._value = value
        self._starts = [slots.data(slot) for slot in range(slots.count)]
        self._size = slots.slot_nbytes // 64 * 64

    @property
    def begun(self) -> bool:
        """Whether the first byte of a slot has come."""
        return any(int(self._memory.view(at, 1)) == self._value for at in self._starts)

    @property
    def ended(self) -> bool:
        """Whether all that comes into that slot has."""
        filled = [self._memory.view(at, self._size).cpu() for at in self._starts]
        return any(bool((slot == self._value).all()) for slot in filled)


def _strike_in_a_put(
    watched: _Watched, pids: list[int], number: signal.Signals, stopped: list[bool]
) -> None:
    while not watched.begun:
        time.sleep(0.0005)
    for pid in pids:
        os.kill(pid, number)
    late = watched.ended
    stopped.append(not late)
    for pid in pids if late and number == signal.SIGSTOP else ():
        os.kill(pid, signal.SIGCONT)


async def started(
    control: Control, environment: dict[str, str], kind: Any, *args: Any
) -> None:
    """A rank of which its launcher says to which start it belongs."""
    os.environ.update(environment)
    await kind(control, *args)


def start_trainers(
    processes: Processes, address: str, numel: int, count: int = 2, **options: Any
) -> list[Child]:
    """Start all trainer ranks, and wait until they are open."""
    keywords = (options.get("epoch"), options.get("lease", 10.0))
    ranks = [
        processes.start(trainer, address, rank, count, numel, *keywords)
        for rank in range(count)
    ]
    assert ["open"] * count == [rank.hear() for rank in ranks]
    return ranks


def start_generators(
    processes: Processes, address: str, numel: int, *options: Any, ranks: int = 1
) -> list[Child]:
    """Start all ranks of the replica "g", without waiting for them."""
    return [
        processes.start(generator, address, "g", rank, ranks, numel, *options)
        for rank in range(ranks)
    ]


def call_all(children: Sequence[Child], name: str, **arguments: Any) -> list[Outcome]:
    """Make a call of several driven children at the same time."""
    for child in children:
        ask(child, name, **arguments)
    return [child.hear() for child in children]


def deliver(
    trainers: Sequence[Child], generators: Sequence[Child], **arguments: Any
) -> list[tuple[int, int]]:
    """Push, and receive on one replica; return the epoch and version on each rank.

    Generators that are out of the pool join again.
    """
    for child in generators:
        ask(child, "receive", timeout=SECONDS)
    call_all(trainers, "wait_for_replicas", count=1)
    pushed = call_all(trainers, "push", timeout=SECONDS, **arguments)
    received = [child.hear() for child in generators]
    wrong = [outcome for outcome in pushed + received if outcome.kind != "ok"]
    assert [] == wrong
    updates = [outcome.value for outcome in received]
    return [(update.epoch, update.version) for update in updates]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What calls returned, all of which went well."""
    assert {"ok"} == {outcome.kind for outcome in outcomes}
    return [outcome.value for outcome in outcomes]


def assert_flat(counted: Sequence[Sequence[Counted]]) -> None:
    """Check that each process has open at the end what it had at first."""
    for first, last in zip(counted[0], counted[-1], strict=True):
        grown = [after - before for before, after in zip(first, last, strict=True)]
        pairs = zip(grown, SLACK, strict=True)
        assert all(more <= slack for more, slack in pairs), counted


def kinds(outcomes: Sequence[Outcome]) -> set[str]:
    """How calls ended."""
    return {outcome.kind for outcome in outcomes}
