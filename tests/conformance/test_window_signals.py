"""Windows: signals, their counting, and who has to take part."""

from __future__ import annotations

import os
import select
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import UNHANDLED, be_done, begun, stay
from tests.conformance.group import job, octets, rank
from tests.conformance.members import leave_together
from tests.conformance.windows import Memory, board, numbers, opened, raised
from weightsync import testing

NEEDS = "windows"


# How signals count


def takes_until_one_more_comes(backend: str, kinds: list[str]) -> list[int]:
    """Rank 0 sends signals, and one put more when rank 1 has taken as many."""
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 1))
        source = memory.holding(numbers(1, 1))
        if rank() == 0:
            for kind in kinds:
                _send(window, source, kind)
            board().wait(["taken"])
            source.copy_(numbers(2, 1))
            window.put(source, 1, 0, False).wait()
            window.wait_signal(1, False).wait()
            return []
        for _ in kinds:
            window.wait_signal(0, True).wait()
        found = tensor.tolist()
        last = window.wait_signal(0, True)
        board().set("taken", "")
        last.wait()
        found += tensor.tolist()
        window.signal(0, False).wait()
        return found


def _send(window: Any, source: torch.Tensor, kind: str) -> None:
    if kind == "put":
        window.put(source, 1, 0, True).wait()
    else:
        window.signal(1, True).wait()


@pytest.mark.parametrize(
    "kinds",
    [["put"], ["put", "put", "put"], ["put", "signal"], ["signal", "put", "signal"]],
    ids="+".join,
)
def test_every_put_and_every_signal_is_one(backend: str, kinds: list[str]) -> None:
    found = testing.emulated(takes_until_one_more_comes, 2, args=[backend, kinds])

    assert [[], [1, 2]] == found


def takes_later(backend: str) -> bool:
    with job(backend) as device:
        _, _, window = opened(device, numbers(0, 1))
        for _ in range(20):
            window.signal(1 - rank(), False).wait()
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(20):
            window.wait_signal(1 - rank(), False).wait()
        torch.cuda.synchronize()
        return True


def test_signals_are_kept_until_somebody_waits(backend: str) -> None:
    assert [True] * 2 == testing.emulated(takes_later, 2, args=[backend])


def waits_for_each(backend: str) -> list[list[int]]:
    """Ranks 1 and 2 put into rank 0, which waits for the later one first."""
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 2))
        if rank() > 0:
            if rank() == 1:
                board().wait(["seen"])
            window.put(memory.holding(numbers(rank(), 1)), 0, rank() - 1, False).wait()
            window.wait_signal(0, False).wait()
            return []
        # Every rank has to have made a call before a stream is waited for.
        window.wait_signal(2, False).wait()
        board().set("seen", "")
        found = [tensor.tolist()[1:]]
        window.wait_signal(1, False).wait()
        found.append(tensor.tolist())
        for peer in (1, 2):
            window.signal(peer, False).wait()
        return found


def test_signals_of_two_ranks_are_told_apart(backend: str) -> None:
    found = testing.emulated(waits_for_each, 3, args=[backend], nccl="2.31.2")

    assert [[[2], [1, 2]], [], []] == found


def two_windows(backend: str) -> list[bytes]:
    with job(backend) as device:
        memory = Memory(device)
        tensors = [memory.holding(numbers(first, 4)) for first in (0, 10)]
        windows = [dist._new_window(each) for each in tensors]
        source = memory.holding(numbers(50, 2))
        windows[0].put(source, 1 - rank(), 0, False).wait()
        windows[1].wait_signal(1 - rank(), False).wait()
        found = octets(tensors[0])
        windows[1].put(source, 1 - rank(), 2, False).wait()
        windows[0].wait_signal(1 - rank(), False).wait()
        return [found, octets(tensors[1])]


def test_windows_of_a_group_have_one_count(backend: str) -> None:
    found = testing.emulated(two_windows, 2, args=[backend])
    first = octets(torch.cat([numbers(50, 2), numbers(2, 2)]))
    second = octets(torch.cat([numbers(10, 2), numbers(50, 2)]))

    assert [[first, second]] * 2 == found


# Who has to take part


def passive_target(backend: str) -> list[int]:
    """Rank 1 is put into, and makes no call itself."""
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 2))
        if rank() == 0:
            window.put(memory.holding(numbers(7, 2)), 1, 0, False).wait()
            torch.cuda.synchronize()
        leave_together(2)
        return tensor.tolist()


@pytest.mark.parametrize("nccl", ["2.30.7", "2.31.2"])
def test_a_target_makes_no_call(backend: str, nccl: str) -> None:
    found = testing.emulated(
        *(passive_target, 2), args=[backend], nccl=nccl, hang_seconds=1
    )

    assert [[0, 1], [7, 8]] == found


def exchanges(backend: str) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 4))
        for peer in range(dist.get_world_size()):
            window.put(memory.holding(numbers(rank(), 1)), peer, rank(), False).wait()
        for peer in range(dist.get_world_size()):
            window.wait_signal(peer, False).wait()
        return octets(tensor)


@pytest.mark.parametrize("nccl", ["2.30.7", "2.31.2"])
@pytest.mark.parametrize("network", ["", "network=0-1,0-2,0-3,1-2,1-3,2-3"])
def test_all_ranks_put_to_all(backend: str, nccl: str, network: str) -> None:
    found = testing.emulated(exchanges, 4, args=[backend], nccl=nccl, faults=network)

    assert [octets(numbers(0, 4))] * 4 == found


def waits_first(backend: str) -> None:
    with job(backend) as device:
        memory, _, window = opened(device, numbers(0, 1))
        window.wait_signal(1 - rank(), True)
        window.put(memory.holding(numbers(0, 1)), 1 - rank(), 0, True).wait()
        torch.cuda.synchronize()


def test_ranks_that_all_wait_before_they_put_hang(backend: str) -> None:
    found = testing.outcomes(waits_first, 2, args=[backend], hang_seconds=1)

    assert [True] * 2 == [each.hung for each in found]
    assert "ncclWaitSignal" in found[0].output


# When nobody signals


def waits_in_vain(backend: str, ending: str) -> list[bool]:
    device = begun(backend, UNHANDLED).device
    _memory, _tensor, window = opened(device, numbers(0, 1))
    window.signal(rank(), False).wait()
    window.wait_signal(rank(), False).wait()
    if rank() == 1:
        stay()
        return []
    work = window.wait_signal(1, True)
    error = raised(work.wait, timedelta(seconds=1))
    if ending == "abort":
        group: Any = dist.group.WORLD
        group.abort()
    be_done()
    return [bool(error)]


def test_a_wait_for_a_signal_ends_when_its_time_is_over(backend: str) -> None:
    found = testing.emulated(waits_in_vain, 2, args=[backend, "exit"])

    assert [[True], []] == found


def test_an_abort_does_not_end_a_wait_for_a_signal(backend: str) -> None:
    first, second = testing.outcomes(
        waits_in_vain, 2, args=[backend, "abort"], hang_seconds=3
    )

    assert first.hung
    assert "ncclWaitSignal" in first.output
    assert second.ok


def puts_to_the_dead(backend: str) -> bool:
    device = begun(backend).device
    memory, _tensor, window = opened(device, numbers(0, 1))
    source = memory.holding(numbers(1, 1))
    window.put(source, 1 - rank(), 0, False).wait()
    window.wait_signal(1 - rank(), False).wait()
    torch.cuda.synchronize()
    if rank() == 1:
        board().set("process", str(os.getpid()))
        window.put(source, 0, 0, False).wait()
        torch.cuda.synchronize()
    process = os.pidfd_open(int(board().get("process")))
    select.select([process], [], [], 20)
    window.put(source, 1, 0, False).wait()
    torch.cuda.synchronize()
    return True


@pytest.mark.parametrize("network", [False, True])
def test_a_put_to_a_dead_rank_is_lost_and_through_a_network_never_ends(
    backend: str, network: bool
) -> None:
    faults = ["put@rank=1,n=2:kill", *(["network=0-1"] if network else [])]
    first, killed = testing.outcomes(
        puts_to_the_dead, 2, args=[backend], faults=faults, hang_seconds=1
    )

    assert -signal.SIGKILL == killed.exit_code
    assert [network, None if network else True] == [first.hung, first.result], first
    assert network == ("ncclPutSignal" in first.output)
