"""Windows on NCCL: batches, counted waits, and weightsync.Window over them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

import anyio
import pytest
import torch
import torch.distributed as dist

from tests.backend.windows import (
    LIMIT,
    NCCLS,
    OURS,
    octet_range,
    opened,
    over,
    table,
)
from tests.conformance.group import error_of, job, rank
from tests.conformance.values import octets
from tests.conformance.windows import board, numbers
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

# --- batches ---

RUNS: Final = (
    [0, 0, 0, 1, 8, 0, 0],  # one row
    [1, 2, 16, 2, 4, 4, 4],  # two rows without a gap: one put
    [1, 0, 32, 3, 2, 5, 8],  # three rows with gaps: three puts
    [0, 0, 64, 0, 8, 8, 8],  # nothing
    [0, 0, 64, 1, 0, 0, 0],  # nothing
)
PUTS: Final = 5


def puts_batches(signals: int) -> list[Any]:
    with job(OURS) as device:
        memory, tensor, window = opened(device, octet_range(100, 64))
        sources = [
            memory.holding(octet_range(0, 16)),
            memory.holding(octet_range(50, 16)),
        ]
        if rank() == 0:
            window.put_many(sources, table(*RUNS), 1, signals, True)
            board().wait(["taken"])
            window.signal(1, False)
            over(window.wait_signals([1], [1], LIMIT, True))
            return []
        over(window.wait_signals([0], [signals], LIMIT, True))
        found = octets(tensor)
        one_more = window.wait_signals([0], [1], LIMIT, True)
        time.sleep(0.1)
        early = one_more.is_completed()
        board().set("taken", "")
        over(one_more)
        window.signal(0, False)
        return [found, early]


@pytest.mark.parametrize("nccl", NCCLS)
@pytest.mark.parametrize("signals", [PUTS, PUTS + 3])
def test_a_batch_writes_its_runs_and_sends_as_many_signals_as_asked(
    signals: int, nccl: str
) -> None:
    found = testing.emulated(puts_batches, 2, args=[signals], nccl=nccl)
    expected = octet_range(100, 64)
    expected[0:8] = octet_range(0, 8)
    expected[16:24] = octet_range(52, 8)
    for row in range(3):
        expected[32 + 8 * row : 34 + 8 * row] = octet_range(50 + 5 * row, 2)

    assert [[], [octets(expected), False]] == found


def refuses_batches() -> dict[str, str]:
    with job(OURS) as device:
        memory, _, window = opened(device, octet_range(0, 64))
        source = memory.holding(octet_range(0, 16))
        elsewhere = torch.empty(16, dtype=torch.uint8, device=device)
        good = table([0, 0, 0, 1, 8, 0, 0])
        calls = {
            "leaves the tensor": ([source], table([0, 1 << 40, 0, 1, 8, 0, 0]), 1),
            "leaves the window": ([source], table([0, 0, 60, 1, 8, 0, 0]), 1),
            "leaves by its stride": ([source], table([0, 0, 0, 2, 8, 0, 1 << 62]), 1),
            "before the window": ([source], table([0, 0, -1, 1, 8, 0, 0]), 1),
            "no such tensor": ([source], table([1, 0, 0, 1, 8, 0, 0]), 1),
            "another dtype": ([source], good.int(), 1),
            "too few columns": ([source], good[:, :6], 1),
            "fewer signals than puts": ([source], good, 0),
            "not of NCCL": ([elsewhere], good, 1),
            "of the host": ([octet_range(0, 16)], good, 1),
        }
        found = {
            name: error_of(
                partial(window.put_many, tensors, runs, 1 - rank(), signals, False)
            )
            for name, (tensors, runs, signals) in calls.items()
        }
        waits = {
            "one count too few": ([0, 1], [1]),
            "a negative count": ([0], [-1]),
            "no such peer": ([2], [1]),
        }
        for name, (peers, counts) in waits.items():
            found[name] = error_of(
                partial(window.wait_signals, peers, counts, LIMIT, False)
            )
        window.put_many([source], good, 1 - rank(), 1, False)
        over(window.wait_signals([1 - rank()], [1], LIMIT, True))
        return found


def test_batches_that_cannot_be_are_refused_and_do_nothing() -> None:
    for found in testing.emulated(refuses_batches, 2):
        kinds = {name: error.partition(":")[0] for name, error in found.items()}

        assert [] == [
            name
            for name, kind in kinds.items()
            if kind not in ("PlanError", "ValueError")
        ]


def waits_for_two() -> list[int]:
    with job(OURS) as device:
        memory, tensor, window = opened(device, numbers(0, 2))
        if rank() == 0:
            over(window.wait_signals([1, 2, 1, 0], [1, 2, 1, 0], LIMIT, True))
            return tensor.tolist()
        source = memory.holding(numbers(rank(), 1))
        for _ in range(2):
            window.put(source, 0, rank() - 1, True)
        torch.cuda.synchronize()
        return []


def test_one_wait_takes_the_signals_of_several_ranks() -> None:
    assert [[1, 2], [], []] == testing.emulated(waits_for_two, 3)


def copies_locally() -> list[bytes]:
    with job(OURS) as device:
        _, tensor, window = opened(device, octet_range(0, 32))
        own = octet_range(100, 16).to(device)
        window.copy_local([own], table([0, 0, 0, 2, 3, 8, 16]), True, False)
        window.copy_local([own], table([0, 12, 20, 1, 4, 0, 0]), False, False)
        return [octets(tensor), octets(own)]


def test_runs_are_copied_into_the_own_window_and_out_of_it() -> None:
    window, own = octet_range(0, 32), octet_range(100, 16)
    window[0:3], window[16:19] = own[0:3], own[8:11]
    own[12:16] = window[20:24]

    assert [[octets(window), octets(own)]] == testing.emulated(copies_locally, 1)


# --- under weightsync.Window ---


def drives() -> list[Any]:
    from weightsync.window import Window

    with job(OURS) as device:
        group: Any = dist.group.WORLD
        tensor = Window.allocate(group, 4096, device=device)
        window = Window(group, tensor)
        found: list[Any] = [window.local.cpu().sum().item(), window.nbytes]
        tensor[:64].copy_(octet_range(rank(), 64))
        torch.cuda.synchronize()
        dist.barrier()
        window.expose()
        peer = 1 - rank()
        window.connect([peer])
        runs = table([0, 0, 1024, 2, 16, 32, 32])
        window.prepare(runs, peer)
        window.put(tensor[:4], peer, offset=2048).wait()
        window.put_many([tensor[:64]], runs, peer).wait(20)
        window.signal(peer).wait(20)
        window.wait_signal(peer, 2).wait()

        async def rest() -> None:
            await window.wait_signals({peer: 2}, timeout=20)
            await window.put(tensor[:4], peer, offset=3000)
            await window.wait_signal(peer)

        anyio.run(rest)
        window.conceal()
        found.append(octets(window.local[1024:]))
        window.close()
        return found


def test_a_window_of_weightsync_works_over_one_of_nccl() -> None:
    found = testing.emulated(drives, 2)
    written = []
    for peer in (1, 0):
        expected = torch.zeros(3072, dtype=torch.uint8)
        expected[1024:1028] = octet_range(peer, 4)
        expected[1976:1980] = octet_range(peer, 4)
        for row in range(2):
            expected[32 * row : 32 * row + 16] = octet_range(peer + 32 * row, 16)
        written.append([0, 4096, octets(expected)])

    assert written == found
