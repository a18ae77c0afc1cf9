"""The processes of the case ``elastic``: trainer ranks, and replicas that come and go.

The director in ``elastic.py`` says when. The clock is CLOCK_MONOTONIC, common to all
processes of a host.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import torch

import weightsync
from weightsync.backend import create_shm
from weightsync.bench.memory import resident_tensor
from weightsync.bench.patterns import VerificationError
from weightsync.window import Window

if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable
    from typing import Any, Literal

    from weightsync.bench.runner import Line

TIMEOUT_SECONDS: Final = 60.0
"""Of every push and opening: none of the figures may depend on it."""

TENSORS: Final = 16
ROW_BYTES: Final = 8192
PAUSE_SECONDS: Final = 0.02
"""Between two pushes of a flow: generators compare their bytes meanwhile."""

SWAP_COPIES: Final = 3
"""Two slots, and the tensors that were registered."""

LOOK_SECONDS: Final = 0.0002
NOTHING: Final = -1


class Held:
    """What a rank of ``world`` has of each tensor: some rows, full of a version."""

    def __init__(self, nbytes: int, rank: int, world: int) -> None:
        rows = nbytes // (TENSORS * ROW_BYTES)
        first, end = rows * rank // world, rows * (rank + 1) // world
        columns = ROW_BYTES // torch.int64.itemsize
        self.tensors: Final = [
            resident_tensor((end - first) * ROW_BYTES)
            .view(torch.int64)
            .view(-1, columns)
            for _ in range(TENSORS)
        ]
        self.entries: Final = {
            f"layers.{index}.weight": weightsync.Shard(
                tensor, global_shape=(rows, columns), offsets=(first, 0)
            )
            for index, tensor in enumerate(self.tensors)
        }
        self.fill(NOTHING)

    def fill(self, version: int) -> None:
        """Write the bytes of a version."""
        for tensor in self.tensors:
            tensor.fill_(version)

    def verify(self, version: int) -> int:
        """Compare every byte; return how many. Raises VerificationError."""
        for index, tensor in enumerate(self.tensors):
            if not bool((tensor == version).all()):
                raise VerificationError(f"layers.{index}.weight is not all {version}")
        return sum(tensor.nbytes for tensor in self.tensors)


class Wait(NamedTuple):
    """To a trainer rank: wait until the pool has so many replicas."""

    replicas: int


class Push(NamedTuple):
    """To a trainer rank: push once, and kill a process so many seconds later."""

    version: int
    victim: int | None = None
    delay: float = 0.0


class Flow(NamedTuple):
    """To trainer rank 0: push again and again until told; watch for a replica."""

    version: int
    name: str = ""


class Pushed(NamedTuple):
    """One push, as a trainer rank saw it."""

    version: int
    called: float
    returned: float
    delivered: tuple[str, ...]
    failed: tuple[str, ...]


class Flowed(NamedTuple):
    """The pushes of a flow, and when the replica was in the pool."""

    pushes: list[Pushed]
    joined: float


async def train(line: Line, nbytes: int, rank: int, world: int, address: str) -> None:
    """Be a trainer rank, until told to end."""
    held = Held(nbytes, rank, world)
    async with weightsync.Trainer(
        address, rank=rank, world_size=world, timeout=TIMEOUT_SECONDS
    ) as transport:
        line.tell(transport.address)
        trainer = _Trainer(line, transport, held)
        while (order := await line.hear()) is not None:
            line.tell(await trainer.obey(order))


class _Trainer:
    def __init__(self, line: Line, transport: weightsync.Trainer, held: Held) -> None:
        self._line: Final = line
        self._transport: Final = transport
        self._held: Final = held

    def obey(self, order: Wait | Push | Flow) -> Awaitable[Any]:
        match order:
            case Wait():
                return self._transport.wait_for_replicas(order.replicas)
            case Push():
                return self._push(order)
            case Flow():
                return self._flow(order)

    async def _push(self, order: Push) -> Pushed:
        self._held.fill(order.version)
        if order.victim is not None:
            _kill_later(order.victim, order.delay)
        called = time.monotonic()
        report = await self._transport.push(self._held.entries, version=order.version)
        returned = time.monotonic()
        failed = tuple(report.failed)
        return Pushed(order.version, called, returned, report.delivered, failed)

    async def _flow(self, order: Flow) -> Flowed:
        found = Flowed([], 0.0)
        stopped = anyio.Event()

        async def hear() -> None:
            await self._line.hear()
            stopped.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            version = order.version
            while not stopped.is_set():
                found.pushes.append(await self._push(Push(version)))
                version += 1
                await anyio.sleep(PAUSE_SECONDS)
        return found._replace(joined=await self._joined(order.name))

    async def _joined(self, name: str) -> float:
        """When a replica became active, by the event of it; 0.0 without a name."""
        if not name:
            return 0.0
        async for event in self._transport.events(after=0):
            if (event.kind, event.name) == ("joined", name):
                # Events have the time of day; both clocks are of this host.
                return event.time - time.time() + time.monotonic()
        raise weightsync.PeerError(f"{name} has not joined")


def _kill_later(pid: int, delay: float) -> None:
    def kill() -> None:
        time.sleep(delay)
        os.kill(pid, 9)

    threading.Thread(target=kill, daemon=True).start()


class Place(NamedTuple):
    """Which rank of which replica, how it joins, and what happens to it.

    ``fate`` is a signal that it gives itself when the first bytes of a version arrive;
    it says when.
    """

    name: str
    mode: Literal["swap", "inplace"]
    rank: int = 0
    world: int = 1
    lease: float = 10.0
    fate: signal.Signals | None = None


class Opened(NamedTuple):
    """When ``Generator`` was made and entered, and when that had returned."""

    entered: float
    opened: float


class First(NamedTuple):
    """When the first version was switched in, and the CPU seconds until then."""

    at: float
    cpu: float


class Kept(NamedTuple):
    """When ``receive`` returned each version, and how many bytes were compared."""

    seen: dict[int, float]
    verified: int


async def generate(line: Line, nbytes: int, place: Place, address: str) -> Kept:
    """Be a rank of a replica from the word to begin until the word to end."""
    held = Held(nbytes, place.rank, place.world)
    line.tell(os.getpid())
    await line.hear()
    entered, cpu = time.monotonic(), time.process_time()
    async with weightsync.Generator(
        address,
        held.entries,
        replica=place.name,
        rank=place.rank,
        world_size=place.world,
        mode=place.mode,
        timeout=TIMEOUT_SECONDS,
        lease=place.lease,
    ) as transport:
        line.tell(Opened(entered, time.monotonic()))
        if place.fate is not None:
            _await_fate(line, held, place.fate)
        kept = Kept({}, 0)
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                """Compare every byte of what comes."""
                nonlocal kept
                async for update in transport:
                    at = time.monotonic()
                    if not kept.seen:
                        line.tell(First(at, time.process_time() - cpu))
                    kept.seen[update.version] = at
                    verified = kept.verified + held.verify(update.version)
                    kept = kept._replace(verified=verified)

            tasks.start_soon(receive)
            await line.hear()
            tasks.cancel_scope.cancel()
    return kept


def _await_fate(line: Line, held: Held, fate: signal.Signals) -> None:
    first = held.tensors[0][0, 0]

    def look() -> None:
        while int(first) == NOTHING:
            time.sleep(LOOK_SECONDS)
        line.tell(time.monotonic())
        os.kill(os.getpid(), fate)

    threading.Thread(target=look, daemon=True).start()


async def hold(line: Line, nbytes: int) -> None:
    """Have as much memory as a generator in mode swap, until killed."""
    memory = [resident_tensor(nbytes) for _ in range(SWAP_COPIES)]
    line.tell(os.getpid())
    await line.hear()
    line.tell(len(memory))


async def burn(line: Line, nbytes: int) -> None:
    """Take as much shared memory as a window of mode swap, and so many CPU seconds.

    Again and again, as often as told.
    """
    line.tell("ready")
    while (seconds := await line.hear()) is not None:
        began, cpu = time.monotonic(), time.process_time()
        group = create_shm(None)
        Window.allocate(group, (SWAP_COPIES - 1) * nbytes)
        while time.process_time() - cpu < seconds:
            pass
        line.tell((began, time.monotonic()))
        group.shutdown()
