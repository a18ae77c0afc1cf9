"""Windows on NCCL: what ours have beside what c10d promises."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PutOptions

from tests.backend.windows import (
    LIMIT,
    MEBI,
    NCCLS,
    OURS,
    mine,
    opened,
    over,
    table,
)
from tests.conformance.endings import be_done, begun, stay
from tests.conformance.group import error_of, job, rank
from tests.conformance.members import quiet
from tests.conformance.values import octets
from tests.conformance.windows import Memory, numbers
from weightsync import testing

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

# --- registration ---


def opens(variables: dict[str, str]) -> list[str]:
    os.environ.update(variables)
    with job(OURS) as device:
        found = error_of(lambda: opened(device, numbers(0, 8)))
        number = numbers(1, 1).to(device)
        dist.all_reduce(number)
        return [found, str(number.tolist())]


@pytest.mark.parametrize(
    ("variables", "faults", "says"),
    [
        ({}, "no-symmetric", "peer-to-peer access"),
        ({"NCCL_WIN_ENABLE": "0"}, "", "NCCL_WIN_ENABLE is 0"),
    ],
)
def test_where_nccl_makes_no_window_the_error_says_why_and_the_group_works(
    variables: dict[str, str], faults: str, says: str
) -> None:
    for error, total in testing.emulated(opens, 2, args=[variables], faults=faults):
        assert error.startswith("UnsupportedError: a window cannot be made: rank ")
        assert "NCCL 2.30.7 makes no windows" in error
        assert says in error
        assert "[2]" == total


def one_has_none(where: str) -> list[str]:
    with job(OURS) as device:
        memory = Memory(device)
        tensor = memory.holding(numbers(0, 4))
        given = tensor if rank() == 0 else numbers(0, 4).to(where)
        found = [error_of(lambda: dist._new_window(given))]
        window = dist._new_window(tensor)
        window.put(tensor, 1 - rank(), 0, False)
        window.wait_signal(1 - rank(), False)
        torch.cuda.synchronize()
        return found


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_memory_that_is_wrong_on_one_rank_is_an_error_on_all(where: str) -> None:
    [first], [second] = testing.emulated(one_has_none, 2, args=[where])

    assert "PlanError: a window cannot be made: rank 1" in first
    assert f"found a tensor on {where}" in second


def registers_badly(timeout: float) -> list[str]:
    quiet()
    limit = timedelta(seconds=timeout)
    device = job(OURS, timeout=limit).__enter__()
    group, began = mine(device), time.monotonic()
    memory = Memory(device)
    tensor = memory.holding(numbers(0, 4))
    found = [error_of(lambda: dist._new_window(tensor))]
    number = numbers(1, 1).to(device)
    found.append(error_of(lambda: dist.all_reduce(number)))
    found += [str(number.tolist()), error_of(lambda: dist._new_window(tensor))]
    group.abort()
    return [*found, "in time" if time.monotonic() - began < 20 else "late"]


def test_a_rank_that_nccl_refuses_is_named_on_all_which_nccl_keeps_waiting() -> None:
    found = testing.emulated(
        registers_badly,
        3,
        args=[40],
        faults="window_register@rank=1:fail=3",
        hang_seconds=0,
    )
    why = "a window cannot be made: rank 1: ncclCommWindowRegister failed: internal"

    assert ["in time"] * 3 == [each[-1] for each in found]
    for at_first, later, total, again, _ in found:
        assert at_first.startswith(f"DistBackendError: {why}")
        assert at_first.endswith("so the process group ends")
        assert later.startswith(f"DistBackendError: {why}")
        assert "[1]" == total
        assert again.startswith(f"ClosedError: this window is closed: {why}")


def test_a_group_whose_ranks_nccl_all_refuses_goes_on() -> None:
    found = testing.emulated(
        registers_badly, 3, args=[40], faults="window_register@n=1:fail=2"
    )

    for number, (at_first, *rest) in enumerate(found):
        assert f"a window cannot be made: rank {number}: ncclComm" in at_first
        assert ["", "[3]", "", "in time"] == rest


def exposes_nothing() -> bytes:
    with job(OURS) as device:
        memory = Memory(device)
        size = 16 if rank() == 1 else 0
        source, tensor = memory.holding(numbers(5, 4)), memory.holding(numbers(0, size))
        window: Any = dist._new_window(tensor)
        first: Any = dist._new_window(source)
        if rank() == 0:
            assert [0, 64] == [window.peer_nbytes(each) for each in (0, 1)]
            window.put(source, 1, 3, True)
            torch.cuda.synchronize()
        else:
            over(window.wait_signals([0], [1], LIMIT, True))
        first.tensor_deregister()
        return octets(tensor)


def test_a_rank_may_expose_nothing() -> None:
    expected = numbers(0, 16)
    expected[3:7] = numbers(5, 4)

    assert [b"", octets(expected)] == testing.emulated(exposes_nothing, 2)


def many_in_one_allocation() -> int:
    with job(OURS) as device:
        memory = Memory(device)
        kept = [dist._new_window(memory.holding(numbers(0, 4))) for _ in range(4)]
        return len(kept)


def test_an_allocation_is_registered_once() -> None:
    found = testing.emulated(
        many_in_one_allocation, 2, faults="window_register@n=2:fail=3"
    )

    assert [4, 4] == found


def grows_on_one_rank() -> list[bytes]:
    """The second window needs new memory on rank 0 alone."""
    with job(OURS) as device:
        memory = Memory(device)
        tensors = [memory.holding(numbers(0, 4))]
        opened_windows: list[Any] = [dist._new_window(tensors[0])]
        size = 4 * MEBI if rank() == 0 else 4
        tensors.append(memory.holding(numbers(0, size)))
        opened_windows.append(dist._new_window(tensors[1]))
        source = memory.holding(numbers(100 + rank(), 1))
        far = 4 * MEBI - 1 if rank() == 1 else 3
        opened_windows[1].put(source, 1 - rank(), far, False)
        opened_windows[0].put(source, 1 - rank(), rank(), False)
        over(opened_windows[0].wait_signals([1 - rank()], [2], LIMIT, True))
        return [octets(tensors[0]), octets(tensors[1][-4:])]


@pytest.mark.parametrize("nccl", NCCLS)
def test_one_rank_may_bring_new_memory_where_another_has_enough(nccl: str) -> None:
    found = testing.emulated(grows_on_one_rank, 2, nccl=nccl)
    large, small = numbers(4 * MEBI - 4, 4), numbers(0, 4)
    large[3], small[3] = 101, 100
    first, second = numbers(0, 4), numbers(0, 4)
    first[1], second[0] = 101, 100

    assert [
        [octets(first), octets(large)],
        [octets(second), octets(small)],
    ] == found


def puts_far() -> list[str]:
    with job(OURS) as device:
        window_bytes = 4 * MEBI if rank() == 1 else 1024
        backend = mine(device)
        tensor = backend.allocate_tensor(window_bytes, dtype=torch.uint8, device=device)
        window: Any = dist._new_window(tensor)
        source = tensor[:8]
        found = ["", ""]
        if rank() == 0:
            found = [
                error_of(lambda: window.put(source, 1, 3 * MEBI, False)),
                error_of(lambda: window.put(source, 1, 1 * MEBI, False)),
            ]
        else:
            over(window.wait_signals([0], [1], LIMIT, True))
        torch.cuda.synchronize()
        window.tensor_deregister()
        return found


def test_what_nccl_refuses_at_launch_is_refused_before() -> None:
    first, _ = testing.emulated(puts_far, 2)

    assert first[0].startswith("UnsupportedError: a put cannot begin at byte 3145728")
    assert "" == first[1]


# --- memory ---


def frees_its_memory() -> list[bool]:
    with job(OURS) as device:
        backend = mine(device)
        dist.barrier()

        def free() -> int:
            return torch.cuda.mem_get_info(device)[0]

        def use() -> list[bool]:
            made = backend.allocate_tensor(8 * MEBI, dtype=torch.uint8, device=device)
            window = dist._new_window(made)
            zeroes = octets(made) == bytes(8 * MEBI)
            window.put(made[:4], rank(), 8, True)
            window.tensor_deregister()
            return [zeroes, free() <= before[0] - 8 * MEBI]

        before = [free()]
        found = use()
        # What was registered for good is there after the first time.
        until(lambda: free() > before[0] - 8 * MEBI)
        before = [free()]
        found += use()
        until(lambda: free() == before[0])
        return [*found, free() == before[0]]


def until(holds: Any) -> None:
    """Wait for the watchdog, which lets go of memory a little later."""
    for _ in range(100):
        gc.collect()
        if holds():
            return
        time.sleep(0.05)


def test_memory_in_an_allocation_of_its_own_is_given_back() -> None:
    assert [[True] * 5] * 2 == testing.emulated(frees_its_memory, 2)


# --- the end ---


def _calls(
    window: Any, source: torch.Tensor, tensor: torch.Tensor
) -> list[tuple[Any, ...]]:
    return [
        (window.put, source, 1 - rank(), 0, False),
        (window.put_many, [source], table(), 1 - rank(), 0, False),
        (window.signal, 1 - rank(), False),
        (window.wait_signal, 1 - rank(), False),
        (window.get_attr, 0),
        (window.map_remote_tensor, rank()),
        (window.tensor_register, tensor),
        (window.tensor_deregister,),
    ]


def uses_after(ending: str) -> list[str]:
    with job(OURS) as device:
        memory, tensor, window = opened(device, numbers(0, 4))
        source = memory.holding(numbers(0, 4))
        dist.barrier()
        torch.cuda.synchronize()
        getattr(mine(device), ending)()
        found = [
            error_of(partial(function, *args))
            for function, *args in _calls(window, source, tensor)
        ]
        del window, tensor, source, memory
        torch.cuda.empty_cache()
        return found


@pytest.mark.parametrize("ending", ["shutdown", "abort"])
def test_a_window_is_closed_with_its_group(ending: str) -> None:
    for errors in testing.emulated(uses_after, 2, args=[ending]):
        assert 8 == len(errors)
        assert [] == [
            error
            for error in errors
            if not error.startswith("ClosedError: this window is closed")
        ]


def aborts_a_wait() -> list[Any]:
    device = begun(OURS).device
    memory, tensor, window = opened(device, numbers(0, 1))
    if rank() == 1:
        stay()
        return []
    work = window.wait_signal(1, True)
    began = time.monotonic()
    mine(device).abort()
    seconds = time.monotonic() - began
    found = [error_of(lambda: over(work)), seconds < 15]
    be_done()
    del memory, tensor, window
    return found


def test_an_abort_with_a_wait_that_nobody_ends_is_over_in_time() -> None:
    first, second = testing.emulated(aborts_a_wait, 2, hang_seconds=0)

    assert [] == second
    assert first[0].startswith("ClosedError: wait_signal")
    assert first[1]


def times_out(kind: str) -> list[str]:
    device = begun(OURS).device
    memory, _tensor, window = opened(device, numbers(0, 1))
    if rank() == 1:
        stay()
        return []
    found = []
    if kind == "wait_signals":
        work = window.wait_signals([1], [1], timedelta(seconds=1), True)
    else:
        asked = PutOptions()
        asked.timeout = timedelta(seconds=1)
        source = memory.holding(numbers(1, 1))
        work = window.put(source, 1, 0, True, asked)
    while not work.is_completed():
        time.sleep(0.01)
    found.append(error_of(work.wait))
    found.append(error_of(lambda: window.signal(1, True)))
    be_done()
    return found


@pytest.mark.parametrize("kind", ["wait_signals", "put"])
def test_what_takes_longer_than_it_may_ends_the_group(kind: str) -> None:
    first, _ = testing.emulated(
        times_out, 2, args=[kind], faults="put:stall", hang_seconds=0
    )

    assert "timed out after 1000 ms" in first[0]
    assert first[1].startswith("ClosedError: this window is closed")
