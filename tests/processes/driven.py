"""Trainers and generators that a test drives, and what they leave behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

import weightsync
from weightsync.slots import HEADER_AREA

if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable, Callable, Mapping

    from tests.processes.harness import Child, Control

MIB = 1 << 20
SENTINEL = 0xA5
GUARD = 64


class Outcome(NamedTuple):
    """How a call ended: "ok" or the class of the error, with value or message."""

    kind: str
    value: Any
    seconds: float


class Held(NamedTuple):
    """What a generator says it holds, and the one value of all bytes.

    None where they differ, or where something was written beside them.
    """

    version: int | None
    value: int | None


class Census(NamedTuple):
    """What a process has open now.

    ``streams`` of an emulated GPU have a thread each, which ``threads`` leaves out, and
    some mappings for it, which it does not.
    """

    descriptors: int
    mappings: int
    threads: int
    streams: int = 0


def census() -> Census:
    """Count descriptors, mappings and threads of this process."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    streams = names.count("emulated stream\n")
    descriptors = len(os.listdir("/proc/self/fd"))
    return Census(descriptors, len(mappings), len(names) - streams, streams)


def resident_mib() -> float:
    """Return the memory that this process occupies."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def in_shared_memory() -> set[str]:
    """Return the names in /dev/shm, but for Python's multiprocessing and torch's.

    Tests beside this one may use these; weightsync does not.
    """
    theirs = ("sem.mp-", "torch_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(theirs)}


async def counted() -> Census:
    """Count what this process has open, once garbage is collected."""
    gc.collect()
    return census()


async def timed(call: Awaitable[Any]) -> Outcome:
    """Await a call and tell how it ended."""
    started = time.monotonic()
    try:
        value = await call
    except weightsync.WeightSyncError as error:
        name = type(error).__name__
        return Outcome(name, str(error), time.monotonic() - started)
    return Outcome("ok", value, time.monotonic() - started)


async def serve(
    control: Control, calls: Mapping[str, Callable[..., Awaitable[Any]]]
) -> None:
    """Make the calls that the test asks for, until it says None.

    A call that does more than it is asked for tells its Outcome itself.
    """
    while (asked := await control.ahear()) is not None:
        name, arguments = asked
        outcome = await timed(calls[name](**arguments))
        told = outcome.value
        control.say(told if isinstance(told, Outcome) else outcome)


def ask(child: Child, name: str, **arguments: object) -> None:
    """Start a call of a driven child; ``child.hear()`` returns its Outcome."""
    child.say((name, arguments))


def call(child: Child, name: str, **arguments: object) -> Outcome:
    """Make a call of a driven child and return its Outcome."""
    ask(child, name, **arguments)
    outcome: Outcome = child.hear()
    return outcome


def close(*children: Child) -> float:
    """Let driven children close and end; return the seconds of the slowest."""
    started = time.monotonic()
    for child in children:
        child.say(None)
    for child in children:
        child.result(15)
    return time.monotonic() - started


async def sleep_through(seconds: float) -> None:
    """Block the caller's thread and its event loop, with the GIL released."""
    time.sleep(seconds)  # noqa: ASYNC251 -- blocking is the point.


async def spin_through(seconds: float) -> None:
    """Block the caller's thread and its event loop by computing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def on(device: str | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device; where it was made if None is given."""
    return tensor if device is None else tensor.to(device)


async def trainer(  # noqa: PLR0917 -- arguments of a process are positional
    control: Control,
    address: str,
    rank: int,
    world_size: int,
    numel: int,
    lease: float = 10.0,
    device: str | None = None,
    replay: bool = False,
) -> None:
    """A trainer rank that pushes its part of ``w``, every byte of it the version.

    After a push these bytes change at once.
    """
    part = numel // world_size
    source = on(device, torch.zeros(part, dtype=torch.uint8))
    shard = weightsync.Shard(source, global_shape=(numel,), offsets=(rank * part,))

    async def push(version: int, **options: Any) -> Outcome:
        source.copy_(torch.full((part,), version, dtype=torch.uint8))
        pushing = transport.push({"w": shard}, version=version, **options)
        outcome = await timed(pushing)
        assert bool((source.cpu() == version).all()), "its source has changed"
        source.copy_(torch.full((part,), SENTINEL, dtype=torch.uint8))
        return outcome

    async def replicas() -> tuple[str, ...]:
        return transport.replicas

    async def event(kind: str) -> weightsync.MembershipEvent:
        """Return the first event of a kind, also if it was long ago."""
        async for found in transport.events(after=0):
            if found.kind == kind:
                return found
        raise weightsync.ClosedError(f"no event of kind {kind}")

    async with weightsync.Trainer(
        address,
        rank=rank,
        world_size=world_size,
        timeout=20,
        lease=lease,
        replay=replay,
    ) as transport:
        control.say("open")
        await serve(
            control,
            {
                "event": event,
                "membership": transport.membership,
                "push": push,
                "replicas": replicas,
                "census": counted,
                "sleep_through": sleep_through,
                "spin_through": spin_through,
                "use_streams": use_streams,
                "wait_for_replicas": transport.wait_for_replicas,
            },
        )


async def synchronize() -> None:
    """Wait until the GPU has nothing to do: a wait for signals would go on for good."""
    torch.cuda.synchronize()


async def use_streams(count: int) -> None:
    """Copy something to the GPU on so many streams of torch, and wait for each."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(8, dtype=torch.uint8).to("cuda", non_blocking=True)
        stream.synchronize()


def _arriving(transport: weightsync.Generator, weight: torch.Tensor) -> torch.Tensor:
    """Where the first byte of a version arrives: in the window, on a GPU."""
    if weight.is_cpu:  # where the tensors live in the window, in mode "inplace"
        return weight[:1]
    joining = transport._core.session._joining

    assert joining is not None
    assert joining.rank._settled is not None
    return joining.rank._settled.memory.view(HEADER_AREA, 1)


async def generator(  # noqa: PLR0917 -- arguments of a process are positional
    control: Control,
    address: str,
    replica: str,
    rank: int,
    world_size: int,
    numel: int,
    mode: Literal["staged", "swap", "inplace"] = "staged",
    lease: float = 10.0,
    device: str | None = None,
    segment_bytes: int | None = None,
    engine: Literal["shm", "nccl", "torch-nccl2"] | None = None,
) -> None:
    """A generator rank that holds ``w``; may kill a process at its first new byte."""
    # In the other modes whole storages are in the window, and nothing lies beside.
    guard = GUARD if mode == "staged" else 0
    around = on(device, torch.full((numel + 2 * guard,), SENTINEL, dtype=torch.uint8))
    weight = around[guard : guard + numel]

    async def receive(**options: Any) -> weightsync.Update:
        return await transport.receive(**options)

    async def held() -> Held:
        found = around.cpu()
        inside = found[guard : guard + numel]
        beside = torch.cat([found[:guard], found[guard + numel :]])
        exact = bool((inside == inside[0]).all() and (beside == SENTINEL).all())
        return Held(transport.version, int(inside[0]) if exact else None)

    async def kill_at_first_byte(pid: int, number: signal.Signals) -> None:
        arriving = _arriving(transport, weight)
        before = int(arriving.cpu())

        def watch() -> None:
            while int(arriving.cpu()) == before:
                time.sleep(0.0005)
            os.kill(pid, number)

        threading.Thread(target=watch, daemon=True).start()

    async with weightsync.Generator(
        address,
        {"w": weight},
        replica=replica,
        rank=rank,
        world_size=world_size,
        mode=mode,
        timeout=20,
        lease=lease,
        segment_bytes=segment_bytes,
        engine=engine,
    ) as transport:
        control.say("open")
        await serve(
            control,
            {
                "receive": receive,
                "held": held,
                "census": counted,
                "synchronize": synchronize,
                "kill_at_first_byte": kill_at_first_byte,
                "sleep_through": sleep_through,
                "spin_through": spin_through,
                "use_streams": use_streams,
            },
        )
