"""Trainers and generators that a test drives, and what they leave behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

import weightsync
from weightsync import _C
from weightsync.slots import HEADER_AREA

if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable, Callable, Mapping

    from tests.processes.harness import Child, Control

MIB = 1 << 20
SENTINEL = 0xA5
GUARD = 64
STREAMS = 40
"""More than torch has, which gives them away one after the other."""


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

    ``mappings`` are those of files and of shared memory: what malloc and threads map
    comes and goes with them. ``streams`` of an emulated GPU have a thread each, which
    ``threads`` leaves out.
    """

    descriptors: int
    mappings: int
    threads: int
    streams: int = 0


def census() -> Census:
    """Count descriptors, mappings and threads of this process."""
    mappings = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/" in line.split(maxsplit=5)[-1]
    ]
    names = [_comm(path) for path in Path("/proc/self/task").glob("*/comm")]
    streams = names.count("emulated stream\n")
    descriptors = len(os.listdir("/proc/self/fd"))
    return Census(descriptors, len(mappings), len(names) - streams, streams)


def _comm(path: Path) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""  # a thread that has ended since it was listed


def census_at_rest(*devices: int) -> Census:
    """Count when garbage is collected, and nothing is left to come that stays.

    On GPUs torch makes a stream when it is wanted, and keeps it: here all of these
    devices have been. The memory that it keeps is given back.
    """
    gc.collect()
    if torch.cuda.is_available():
        for device in devices:
            with torch.cuda.device(device):
                occupy_streams(STREAMS)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    return census()


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
    known = {**calls, **control.calls}
    while (asked := await control.ahear()) is not None:
        name, arguments = asked
        outcome = await timed(known[name](**arguments))
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
    straight: bool = False,
) -> None:
    """A trainer rank that pushes its part of ``w``, every byte of it the version.

    After a push these bytes change at once. They may be put ``straight``.
    """
    part = numel // world_size
    with weightsync.nccl_memory() if straight else nullcontext():
        source = on(device, torch.zeros(part, dtype=torch.uint8))
    shard = weightsync.Shard(source, global_shape=(numel,), offsets=(rank * part,))

    async def push(version: int, **options: Any) -> Outcome:
        source.copy_(torch.full((part,), version, dtype=torch.uint8))
        control.reach("pushing")
        outcome = await timed(transport.push({"w": shard}, version=version, **options))
        control.reach("pushed")
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

    control.reach("opening")
    async with weightsync.Trainer(
        address,
        rank=rank,
        world_size=world_size,
        timeout=20,
        lease=lease,
        replay=replay,
        staging="none" if straight else "copy",
        memory={"w": shard} if straight else None,
    ) as transport:
        control.reach("opened")
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
        control.reach("closing")
    control.reach("closed")


async def synchronize() -> None:
    """Wait until the GPU has nothing to do: a wait for signals would go on for good."""
    torch.cuda.synchronize()


async def use_streams(count: int) -> None:
    """See ``occupy_streams``."""
    occupy_streams(count)


def occupy_streams(count: int) -> None:
    """Give so many streams of torch something to do, and wait for each."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        bell = _C.Bell()
        bell.ring_after(stream.stream_id, stream.device_index)
        stream.synchronize()
        bell.close()


def _arriving(
    transport: weightsync.Generator, weight: torch.Tensor, at: int
) -> torch.Tensor:
    """Where this byte of a version arrives: in the window, on a GPU."""
    if weight.is_cpu:  # where the tensors live in the window, in mode "inplace"
        return weight[at : at + 1]
    joining = transport._core.session._joining

    assert joining is not None
    assert joining.rank._settled is not None
    return joining.rank._settled.memory.view(HEADER_AREA + at, 1)


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
        control.reach("receiving")
        try:
            return await transport.receive(**options)
        finally:
            control.reach("received")

    async def held() -> Held:
        found = around.cpu()
        inside = found[guard : guard + numel]
        beside = torch.cat([found[:guard], found[guard + numel :]])
        exact = bool((inside == inside[0]).all() and (beside == SENTINEL).all())
        return Held(transport.version, int(inside[0]) if exact else None)

    async def kill_at_first_byte(pid: int, number: signal.Signals, at: int = 0) -> None:
        arriving = _arriving(transport, weight, at)
        before = int(arriving.cpu())

        def watch() -> None:
            while int(arriving.cpu()) == before:
                time.sleep(0.0005)
            os.kill(pid, number)

        threading.Thread(target=watch, daemon=True).start()

    control.reach("opening")
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
        control.reach("opened")
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
        control.reach("closing")
    control.reach("closed")
