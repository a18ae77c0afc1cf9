"""Windows on NCCL by ``weightsync.Window``, as whoever uses it alone does."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import be_done, begun, stay
from tests.conformance.group import error_of, job, rank
from tests.conformance.values import octets
from tests.conformance.windows import board
from weightsync import Window, testing

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

OURS: Final = "weightsync-nccl2"
NBYTES: Final = 4096
MEBI: Final = 1 << 20

LOOPS: Final = pytest.mark.parametrize("loop", ["asyncio", "trio"])


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


def opened(device: torch.device, nbytes: int = NBYTES) -> Window:
    """Open a window over memory of its own."""
    group: Any = dist.group.WORLD
    return Window(group, Window.allocate(group, nbytes, device=device))


def kinds(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Return the class of the error of each call."""
    return {name: error_of(call).partition(":")[0] for name, call in calls.items()}


# What cannot be a window


def no_windows() -> dict[str, str]:
    with job(OURS) as device:
        group: Any = dist.group.WORLD
        other = torch.device("cuda", 1 - rank())
        elsewhere = Window.allocate(group, 64, device=other)
        found = kinds(
            {
                "of the host": lambda: Window(group, torch.zeros(64).byte()),
                "of another GPU": lambda: Window(group, elsewhere),
                "not of NCCL": lambda: Window(
                    group, torch.zeros(64, dtype=torch.uint8).to(device)
                ),
                "not of bytes": lambda: Window(group, torch.zeros(64).to(device)),
                "of no bytes": lambda: Window.allocate(group, 0, device=device),
            }
        )
        with opened(device) as window:
            window.put(window.local[:4], 1 - rank()).wait(20)
            window.wait_signal(1 - rank()).wait(20)
        return found


def test_what_cannot_be_a_window_is_refused_and_the_group_stays() -> None:
    expected = {
        "of the host": "PlanError",
        "of another GPU": "PlanError",
        "not of NCCL": "UnsupportedError",
        "not of bytes": "PlanError",
        "of no bytes": "PlanError",
    }

    assert [expected] * 2 == testing.emulated(no_windows, 2)


def allocates_too_much() -> list[Any]:
    with job(OURS) as device:
        group: Any = dist.group.WORLD
        found = error_of(lambda: Window.allocate(group, 4 << 30, device=device))
        small = Window.allocate(group, 100, device=f"cuda:{device.index}")
        return [found, str(small.device), small.shape[0], octets(small)]


def test_memory_that_a_gpu_has_not_is_an_error() -> None:
    found = testing.emulated(allocates_too_much, 2, faults="out-of-memory=1GiB")

    for number, (error, device, size, held) in enumerate(found):
        assert error.startswith("OutOfMemoryError: NCCL has no 4294967296 bytes")
        assert (f"cuda:{number}", 100, bytes(100)) == (device, size, held)


# What cannot be put


def refused() -> dict[str, str]:
    with job(OURS) as device:
        window, peer = opened(device), 1 - rank()
        source = window.local[:8]
        host, plain = torch.zeros(8).byte(), torch.zeros(8).byte().to(device)
        row = [0, 0, 0, 1, 8, 0, 0]
        found = kinds(
            {
                "beyond the end": lambda: window.put(source, peer, offset=NBYTES - 7),
                "before it": lambda: window.put(source, peer, offset=-1),
                "of the host": lambda: window.put(host, peer),
                "not of NCCL": lambda: window.put(plain, peer),
                "no such rank": lambda: window.put(source, 2),
                "many of the host": lambda: window.put_many([host], table(row), peer),
                "many, not of NCCL": lambda: window.put_many([plain], table(row), peer),
                "many to no such rank": lambda: window.put_many(
                    [source], table(row), 2
                ),
                "many beyond the source": lambda: window.put_many(
                    [source], table([0, NBYTES, 0, 1, 8, 0, 0]), peer
                ),
                "many beyond the end": lambda: window.put_many(
                    [source], table([0, 0, NBYTES, 1, 8, 0, 0]), peer
                ),
                "no table": lambda: window.put_many([source], table(row).int(), peer),
                "signal to no such rank": lambda: window.signal(2),
                "wait for no such rank": lambda: window.wait_signal(2),
                "wait for less than nothing": lambda: window.wait_signals({peer: -1}),
            }
        )
        window.put(source, peer).wait(20)
        window.wait_signal(peer).wait(20)
        window.close()
        return found


def test_what_cannot_be_put_is_refused_and_nothing_is_sent() -> None:
    for found in testing.emulated(refused, 2):
        assert 14 == len(found)
        assert {"PlanError"} == set(found.values())


def puts_from_little() -> list[str]:
    with job(OURS) as device:
        window = opened(device, 64 if rank() == 0 else 4 * MEBI)
        if rank() == 1:
            window.wait_signal(0).wait(20)
            window.close()
            return [octets(window._tensor[MEBI : MEBI + 4]).hex()]
        source = window.local[:4]
        row = [0, 0, 3 * MEBI, 1, 4, 0, 0]
        found = [
            error_of(lambda: window.put(source, 1, offset=3 * MEBI)),
            error_of(lambda: window.put_many([source], table(row), 1)),
        ]
        source.copy_(torch.tensor([1, 2, 3, 4]).byte())
        window.put(source, 1, offset=MEBI).wait(20)
        window.close()
        return found


def test_a_put_beyond_the_share_of_the_caller_is_refused() -> None:
    errors, arrived = testing.emulated(puts_from_little, 2)

    assert ["01020304"] == arrived
    for error in errors:
        assert error.startswith("UnsupportedError: a put cannot begin at byte 3145728")
        assert "that rank 0 registered" in error


# The end


def closes() -> dict[str, str]:
    with job(OURS) as device:
        window, peer = opened(device), 1 - rank()
        source = window.local[:8]
        window.expose()
        found = kinds({"exposed": lambda: window.local})
        window.close()
        window.close()
        found |= kinds(
            {
                "local": lambda: window.local,
                "put": lambda: window.put(source, peer),
                "put_many": lambda: window.put_many([source], table(), peer),
                "signal": lambda: window.signal(peer),
                "wait_signal": lambda: window.wait_signal(peer),
                "connect": lambda: window.connect([peer]),
                "prepare": lambda: window.prepare(table(), peer),
                "copy_in": lambda: window.copy_in([source], table()),
            }
        )
        return found


def test_a_closed_window_raises() -> None:
    for found in testing.emulated(closes, 2):
        assert "EpochError" == found.pop("exposed")
        assert 8 == len(found)
        assert {"ClosedError"} == set(found.values())


def fails(awaits: bool) -> list[str]:
    """Return what a wait for a signal that does not come in time raises."""
    device = begun(OURS).device
    window = opened(device)
    if rank() == 1:
        stay()
        return []

    async def wait() -> None:
        await window.wait_signal(1, timeout=1)

    late = partial(anyio.run, wait) if awaits else window.wait_signal(1).wait
    arguments = [] if awaits else [1]
    found = [error_of(partial(late, *arguments))]
    found.append(error_of(lambda: window.put(window.local[:4], 1)))
    be_done()
    return found


@pytest.mark.parametrize("awaits", [False, True], ids=["blocking", "awaited"])
def test_a_signal_that_does_not_come_in_time_ends_the_group(awaits: bool) -> None:
    first, second = testing.emulated(fails, 2, args=[awaits], hang_seconds=0)

    assert [] == second
    assert first[0].startswith("TimedOutError: wait_signal")
    assert first[1].startswith("ClosedError: this window is closed: wait_signal")


# Awaiting


def awaits_all(loop: str) -> bytes:
    with job(OURS) as device, opened(device) as window:
        peer = 1 - rank()
        source = window.local[:16]
        source.copy_(torch.arange(16).byte() + 16 * rank())
        torch.cuda.synchronize()
        dist.barrier()

        async def both() -> None:
            row = [0, 0, 128, 2, 4, 8, 64]
            await window.put(source.view(torch.float32)[:2], peer, offset=64)
            await window.put_many([source], table(row), peer)
            await window.signal(peer)
            await window.wait_signals({peer: 4}, timeout=30)

        anyio.run(both, backend=loop)
        return octets(window.local[64:256])


@LOOPS
def test_everything_can_be_awaited(loop: str) -> None:
    expected = []
    for peer in (1, 0):
        sent = torch.arange(16).byte() + 16 * peer
        whole = torch.zeros(256, dtype=torch.uint8)
        whole[64:72] = sent[:8]
        whole[128:132], whole[192:196] = sent[:4], sent[8:12]
        expected.append(octets(whole[64:]))

    assert expected == testing.emulated(awaits_all, 2, args=[loop])


def cancels(loop: str) -> list[Any]:
    with job(OURS) as device, opened(device) as window:
        if rank() == 1:
            board().wait(["cancelled"])
            window.signal(0).wait(20)
            return []

        async def impatient() -> bool:
            with anyio.move_on_after(0.2) as scope:
                await operation
            return scope.cancelled_caught

        operation = window.wait_signal(1)
        began = time.monotonic()
        found = [anyio.run(impatient, backend=loop), time.monotonic() - began < 10]
        early = operation.done()
        board().set("cancelled", "")
        operation.wait(20)
        return [*found, early]


@LOOPS
def test_an_await_can_be_cancelled_and_the_wait_goes_on(loop: str) -> None:
    assert [[True, True, False], []] == testing.emulated(cancels, 2, args=[loop])
