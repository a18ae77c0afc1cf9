"""Windows: what may be one, for how long, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WindowAccessType

from tests.conformance.group import job, octets, rank
from tests.conformance.members import leave_together
from tests.conformance.windows import Memory, numbers, opened, raised
from weightsync import testing

NEEDS = "windows"


def exchange(window: Any, source: torch.Tensor, target: torch.Tensor) -> bytes:
    """Put into the window of the other of two ranks, and return what came."""
    window.put(source, 1 - rank(), 0, False).wait()
    window.wait_signal(1 - rank(), False).wait()
    return octets(target)


# What is refused, and what it leaves


def refused_calls(backend: str) -> dict[str, str]:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 8))
        source, peer = memory.holding(numbers(0, 4)), 1 - rank()
        calls = _calls(memory, window, source, peer)
        found = {name: raised(*call) for name, call in calls.items()}
        window.put(source, peer, 4, False).wait()
        window.wait_signal(peer, False).wait()
        return {**found, "left": str(tensor.tolist())}


def _calls(
    memory: Memory, window: Any, source: torch.Tensor, peer: int
) -> dict[str, tuple[Any, ...]]:
    put = window.put
    elsewhere = torch.empty(4, dtype=torch.int32, device="cuda")
    wide = memory.holding(numbers(0, 16).reshape(4, 4))
    long = memory.holding(numbers(0, 4, torch.int64))
    return {
        "beyond the end": (put, source, peer, 5, False),
        "at the end": (put, source, peer, 8, False),
        "far beyond": (put, source, peer, 1 << 61, False),
        "before the beginning": (put, source, peer, -1, False),
        "another dtype": (put, long, peer, 0, False),
        "same size, another dtype": (put, source.view(torch.float32), peer, 0, False),
        "not registered": (put, elsewhere, peer, 0, False),
        "of the host": (put, numbers(0, 4), peer, 0, False),
        "with gaps": (put, wide[:, 1], peer, 0, False),
        "no such rank": (put, source, 2, 0, False),
        "rank -1": (put, source, -1, 0, False),
        "signal to no such rank": (window.signal, 2, False),
        "wait for no such rank": (window.wait_signal, -1, False),
        "attributes of no such rank": (window.get_attr, 2),
        "memory of no such rank": (window.map_remote_tensor, 2),
        "memory of another rank": (window.map_remote_tensor, peer),
        "registered twice": (window.tensor_register, source),
    }


def test_what_cannot_be_is_refused_and_does_nothing(backend: str) -> None:
    for found in testing.emulated(refused_calls, 2, args=[backend]):
        left = found.pop("left")

        assert [] == [name for name, error in found.items() if not error]
        assert str([0, 1, 2, 3, 0, 1, 2, 3]) == left


def ordinary_memory(backend: str, collective: bool) -> list[str]:
    with job(backend) as device:
        if collective:
            dist.barrier(device_ids=[device.index])
        tensor = numbers(0, 8).to(device)
        found = [raised(dist._new_window, tensor)]
        found.append(raised(dist._new_window, numbers(0, 8)))
        return found


def test_ordinary_memory_is_no_window(backend: str) -> None:
    for errors in testing.emulated(ordinary_memory, 2, args=[backend, False]):
        assert all(errors)


def opens_without_support(backend: str) -> str:
    with job(backend) as device:
        return raised(opened, device, numbers(0, 8))


def test_a_window_that_nccl_does_not_make_is_an_error(backend: str) -> None:
    for error in testing.emulated(
        opens_without_support, 2, args=[backend], faults="no-symmetric"
    ):
        assert error


def before_registration(backend: str) -> list[str]:
    with job(backend) as device:
        memory = Memory(device)
        source, window = memory.holding(numbers(0, 4)), dist._new_window()
        found = [raised(*call) for call in _uses(window, source)]
        window.tensor_register(source)
        window.tensor_deregister()
        found += [raised(*call) for call in _uses(window, source)]
        return [*found, raised(window.tensor_deregister)]


def _uses(window: Any, source: torch.Tensor) -> list[tuple[Any, ...]]:
    return [
        (window.put, source, 1 - rank(), 0, False),
        (window.signal, 1 - rank(), False),
        (window.wait_signal, 1 - rank(), False),
        (window.get_attr, rank()),
        (window.map_remote_tensor, rank()),
    ]


def test_a_window_without_memory_does_nothing(backend: str) -> None:
    for errors in testing.emulated(before_registration, 2, args=[backend]):
        assert 11 == len(errors)
        assert all(errors)


# What a window says of itself


def attributes(backend: str) -> list[Any]:
    with job(backend) as device:
        _, tensor, window = opened(device, numbers(0, 8))
        access = [window.get_attr(each).access_type for each in (0, 1)]
        own = window.map_remote_tensor(rank())
        return [
            [each == WindowAccessType.SEPARATE for each in access],
            [own.data_ptr() == tensor.data_ptr(), own.tolist()],
        ]


def test_a_window_is_separate_and_maps_its_own_memory(backend: str) -> None:
    found = testing.emulated(attributes, 2, args=[backend])

    assert [[[True, True], [True, list(range(8))]]] * 2 == found


def support(backend: str) -> list[Any]:
    with job(backend) as device:
        group: Any = dist.group.WORLD
        found = [
            dist._supports_window(),
            group._get_backend(device).supports_window,
            dist.new_group(device_id=device).supports_window,
        ]
        leave_together(2)
        return found


def test_every_group_has_windows(backend: str) -> None:
    assert [[True] * 3] * 2 == testing.emulated(support, 2, args=[backend])


# How long memory is one


def keeps(backend: str, owning: bool) -> list[bool]:
    with job(backend) as device:
        memory = Memory(device)
        tensor, window = memory.holding(numbers(0, 1 << 16)), dist._new_window()
        window.tensor_register(tensor, owning)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        del tensor
        kept = [before == torch.cuda.memory_allocated()]
        window.tensor_deregister()
        torch.cuda.synchronize()
        return [*kept, before == torch.cuda.memory_allocated()]


@pytest.mark.parametrize("owning", [False, True])
def test_a_window_keeps_its_memory_if_it_is_to_own_it(
    backend: str, owning: bool
) -> None:
    found = testing.emulated(keeps, 2, args=[backend, owning])

    assert [[owning, False]] * 2 == found


def maps_what_it_does_not_own(backend: str) -> list[Any]:
    with job(backend) as device:
        memory = Memory(device)
        tensor, window = memory.holding(numbers(0, 4)), dist._new_window()
        window.tensor_register(tensor, False)
        error = raised(window.map_remote_tensor, rank())
        return [bool(error), exchange(window, memory.holding(numbers(9, 4)), tensor)]


def test_a_window_that_does_not_own_cannot_map(backend: str) -> None:
    found = testing.emulated(maps_what_it_does_not_own, 2, args=[backend])

    assert [[True, octets(numbers(9, 4))]] * 2 == found


def registers_again(backend: str) -> list[bytes]:
    with job(backend) as device:
        memory, first, window = opened(device, numbers(0, 4))
        source = memory.holding(numbers(10, 4))
        found = [exchange(window, source, first)]
        window.tensor_deregister()
        # Larger than what the allocator puts beside the first.
        second = memory.holding(numbers(100, 1 << 20))
        window.tensor_register(second)
        found.append(exchange(window, source, second[:5]))
        window.tensor_deregister()
        first.copy_(numbers(0, 4))
        window.tensor_register(first)
        source.copy_(numbers(20, 4))
        return [*found, exchange(window, source, first)]


def test_a_window_may_take_other_memory_and_the_same_again(backend: str) -> None:
    found = testing.emulated(registers_again, 2, args=[backend])
    second = torch.cat([numbers(10, 4), numbers(104, 1)])
    expected = [numbers(10, 4), second, numbers(20, 4)]

    assert [[octets(each) for each in expected]] * 2 == found


def frees(backend: str) -> list[bytes]:
    with job(backend) as device:
        found = []
        for first in range(3):
            memory, tensor, window = opened(device, numbers(0, 4))
            source = memory.holding(numbers(first, 4))
            found.append(exchange(window, source, tensor))
            window.tensor_deregister()
            del tensor, window, source, memory
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return found


def test_memory_that_was_a_window_can_be_freed(backend: str) -> None:
    found = testing.emulated(frees, 2, args=[backend])

    assert [[octets(numbers(first, 4)) for first in range(3)]] * 2 == found


def many_windows(backend: str, count: int) -> list[bytes]:
    with job(backend) as device:
        memory = Memory(device)
        source = memory.holding(numbers(0, 4))
        tensors = [memory.holding(numbers(-4, 4)) for _ in range(count)]
        windows = [dist._new_window(each) for each in tensors]
        for number, window in enumerate(windows):
            source.copy_(numbers(number, 4))
            window.put(source, 1 - rank(), 0, False).wait()
        for window in reversed(windows):
            window.wait_signal(1 - rank(), False).wait()
        return [octets(each) for each in tensors]


def test_a_group_has_many_windows(backend: str) -> None:
    found = testing.emulated(many_windows, 2, args=[backend, 20])

    assert [[octets(numbers(number, 4)) for number in range(20)]] * 2 == found
