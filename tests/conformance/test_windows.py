"""Windows: what a put writes, where, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import job, octets, rank
from tests.conformance.windows import Memory, numbers, opened
from weightsync import testing

NEEDS = "windows"

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
OTHERS = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64)


# Where a put goes


def puts_to_the_next(backend: str, asynchronous: bool) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(-100, 40))
        source = memory.holding(numbers(10 * rank(), 5))
        others = dist.get_world_size()
        window.put(source, (rank() + 1) % others, 7 + rank(), asynchronous).wait()
        window.wait_signal((rank() - 1) % others, asynchronous).wait()
        return octets(tensor)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_put_writes_at_an_offset_in_elements_and_nothing_else(
    backend: str, asynchronous: bool
) -> None:
    found = testing.emulated(puts_to_the_next, 3, args=[backend, asynchronous])
    expected = [numbers(-100, 40) for _ in range(3)]
    for sender in range(3):
        target = expected[(sender + 1) % 3]
        target[7 + sender : 12 + sender] = numbers(10 * sender, 5)

    assert [octets(each) for each in expected] == found


def puts_to_itself(backend: str) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 8))
        window.put(memory.holding(numbers(50, 3)), rank(), 5, False).wait()
        window.wait_signal(rank(), False).wait()
        return octets(tensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_puts_to_itself(backend: str, ranks: int) -> None:
    found = testing.emulated(puts_to_itself, ranks, args=[backend])

    assert [octets(torch.cat([numbers(0, 5), numbers(50, 3)]))] * ranks == found


def puts_of_views(backend: str) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 12).reshape(3, 4))
        source = memory.holding(numbers(100, 12).reshape(4, 3))
        window.put(source[1:3], 1 - rank(), 1, False).wait()
        window.put(source[0, 0], 1 - rank(), 11, False).wait()
        for _ in range(2):
            window.wait_signal(1 - rank(), False).wait()
        return octets(tensor)


def test_shapes_mean_nothing_and_a_source_may_be_a_part(backend: str) -> None:
    found = testing.emulated(puts_of_views, 2, args=[backend])
    expected = numbers(0, 12)
    expected[1:7] = numbers(103, 6)
    expected[11] = 100

    assert [octets(expected)] * 2 == found


def puts_to_windows_of_different_places(backend: str) -> bytes:
    with job(backend) as device:
        memory = Memory(device)
        # The two windows are of different sizes, and elsewhere in their segments.
        kept = memory.holding(numbers(0, 3000 * (1 + rank())))
        tensor = memory.holding(numbers(0, 10 + 20 * rank()))
        window = dist._new_window(tensor)
        window.put(kept[:4], 1 - rank(), 6 + 20 * (1 - rank()), False).wait()
        window.wait_signal(1 - rank(), False).wait()
        return octets(tensor)


def test_a_window_may_be_of_another_size_and_place_on_every_rank(backend: str) -> None:
    found = testing.emulated(puts_to_windows_of_different_places, 2, args=[backend])
    expected = [
        torch.cat([numbers(0, 6 + 20 * rank), numbers(0, 4)]) for rank in (0, 1)
    ]

    assert [octets(each) for each in expected] == found


# What a put carries


def bits(dtype: torch.dtype) -> torch.Tensor:
    """Every byte value, but for truth values, as elements of a dtype."""
    if dtype == torch.bool:
        return torch.tensor([False, True, True, False] * 4)
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def puts_of_dtypes(backend: str, names: list[str]) -> list[bytes]:
    with job(backend) as device:
        memory = Memory(device)
        return [_put_of_dtype(memory, getattr(torch, name)) for name in names]


def _put_of_dtype(memory: Memory, dtype: torch.dtype) -> bytes:
    values = bits(dtype)
    tensor = memory.holding(torch.empty(len(values) + 3, dtype=dtype))
    window = dist._new_window(tensor)
    try:
        window.put(memory.holding(values), 1 - rank(), 3, False).wait()
    except RuntimeError:
        return b""
    window.wait_signal(1 - rank(), False).wait()
    return octets(tensor[3:])


def test_puts_carry_every_dtype_of_nccl_unchanged(backend: str) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    found = testing.emulated(puts_of_dtypes, 2, args=[backend, names])

    assert [[octets(bits(dtype)) for dtype in DTYPES]] * 2 == found


def test_another_dtype_arrives_unchanged_or_is_refused(backend: str) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in OTHERS]
    found = testing.emulated(puts_of_dtypes, 2, args=[backend, names])
    correct = [octets(bits(dtype)) for dtype in OTHERS]

    assert found[0] == found[1]
    assert all(got in (b"", want) for got, want in zip(found[0], correct, strict=True))


def puts_nothing(backend: str) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 4))
        window.put(memory.holding(numbers(9, 2))[:0], 1 - rank(), 4, False).wait()
        window.wait_signal(1 - rank(), False).wait()
        return octets(tensor)


def test_a_put_of_nothing_is_a_signal(backend: str) -> None:
    found = testing.emulated(puts_nothing, 2, args=[backend])

    assert [octets(numbers(0, 4))] * 2 == found


# In which order


def rounds(backend: str, count: int) -> list[bool]:
    with job(backend) as device:
        size = (8 << 20) // 4
        memory, tensor, window = opened(device, numbers(0, size))
        source = memory.holding(numbers(0, size))
        right = []
        for turn in range(count):
            if rank() == 0:
                source.copy_(numbers(turn, size))
                window.put(source, 1, 0, False).wait()
                window.wait_signal(1, False).wait()
            else:
                window.wait_signal(0, False).wait()
                right.append(octets(tensor) == octets(numbers(turn, size)))
                window.signal(0, False).wait()
        return right


def test_a_signal_comes_after_all_the_data_of_its_put(backend: str) -> None:
    found = testing.emulated(rounds, 2, args=[backend, 3])

    assert [[], [True] * 3] == found


def overlapping(backend: str) -> list[bytes]:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 6))
        if rank() == 0:
            for first, offset in ((10, 0), (20, 2), (30, 1)):
                window.put(memory.holding(numbers(first, 3)), 1, offset, True).wait()
            torch.cuda.synchronize()
            window.wait_signal(1, False).wait()
            return []
        for _ in range(3):
            window.wait_signal(0, False).wait()
        found = [octets(tensor)]
        window.signal(0, False).wait()
        return found


def test_puts_to_one_rank_arrive_in_their_order(backend: str) -> None:
    found = testing.emulated(overlapping, 2, args=[backend])

    assert [[], [octets(torch.tensor([10, 30, 31, 32, 22, 5], dtype=torch.int32))]] == (
        found
    )


def put_then_collective(backend: str) -> list[bytes]:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 4))
        own = memory.holding(numbers(100 * (1 + rank()), 4))
        window.put(own, 1 - rank(), 0, False)
        dist.all_reduce(own)
        window.wait_signal(1 - rank(), False).wait()
        return [octets(tensor), octets(own)]


def test_collectives_between_a_put_and_its_wait_do_not_disturb(backend: str) -> None:
    found = testing.emulated(put_then_collective, 2, args=[backend])
    total = octets(torch.tensor([300, 302, 304, 306], dtype=torch.int32))
    got = [octets(numbers(200, 4)), octets(numbers(100, 4))]

    assert [[each, total] for each in got] == found


# When memory is read


def overwrites(backend: str, early: bool) -> bytes:
    with job(backend) as device:
        memory, tensor, window = opened(device, numbers(0, 4))
        source = memory.holding(numbers(10, 4))
        torch.cuda.synchronize()
        other = torch.cuda.Stream() if early else torch.cuda.current_stream()
        window.put(source, 1 - rank(), 0, False)
        with torch.cuda.stream(other):
            source.copy_(numbers(20, 4).pin_memory(), non_blocking=True)
        window.wait_signal(1 - rank(), False).wait()
        return octets(tensor)


@pytest.mark.parametrize(("early", "first"), [(False, 10), (True, 20)])
def test_a_source_is_read_when_the_put_runs(
    backend: str, early: bool, first: int
) -> None:
    found = testing.emulated(
        overwrites, 2, args=[backend, early], faults="put:delay=0.2"
    )

    assert [octets(numbers(first, 4))] * 2 == found
