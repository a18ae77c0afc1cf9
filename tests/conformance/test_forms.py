"""Every collective: in worlds of every size, in groups, on streams, asynchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.calls import EVERY, FORMS, Call, issue, made, perform, promised
from tests.conformance.coalesced import COALESCED
from tests.conformance.exchanges import EXCHANGES
from tests.conformance.group import Answer, job, rank
from tests.conformance.operations import OPERATIONS
from tests.conformance.values import octets
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CALLS: Final = [Call(name) for name in [*OPERATIONS, *COALESCED, *EXCHANGES]]

LATE: Final = "*:delay=0.002"
"""Every operation of NCCL takes longer than the copies before and after it."""

ROWS: Final = ([1, 2], [0, 3])
"""Two groups beside each other. Rank 0 is not in the first one."""


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_collective_works_in_every_world(
    backend: str, world: int, deviations: Callable[..., Any]
) -> None:
    expected = [promised(CALLS, world, each) for each in range(world)]
    found = testing.emulated(perform, world, args=[backend, CALLS])

    assert {} == deviations(expected, found)


def test_a_result_is_there_when_its_work_or_its_future_was_waited_for(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [
        call._replace(form=form)
        for call in map(Call, OPERATIONS)
        for form in FORMS[1:]
        # c10d gives a future for it, and no work.
        if form == "wait" or call.operation != "all_reduce_coalesced"
    ]

    expected = [promised(calls, 2, each) for each in range(2)]
    found = testing.emulated(perform, 2, args=[backend, calls], faults=LATE)

    assert {} == deviations(expected, found)


def test_nothing_is_moved_as_well_as_something(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [
        call._replace(count=0, form=form)
        for call in CALLS
        for form in ("sync", "wait")
        if "uneven" not in call.operation
    ]

    expected = [promised(calls, 2, each) for each in range(2)]
    found = testing.emulated(perform, 2, args=[backend, calls])

    assert {} == deviations(expected, found)


def in_groups(backend: str, calls: Sequence[Sequence[Any]]) -> dict[str, Answer]:
    with job(backend) as device:
        groups = [dist.new_group(ranks) for ranks in ROWS]
        mine = next(
            group for group, row in zip(groups, ROWS, strict=True) if rank() in row
        )
        return made([Call(*call) for call in calls], device, mine)


def test_every_collective_works_in_a_group_of_some_ranks(
    backend: str, deviations: Callable[..., Any]
) -> None:
    rows = [next(row for row in ROWS if each in row) for each in range(4)]

    expected = [promised(CALLS, 2, row.index(each)) for each, row in enumerate(rows)]
    found = testing.emulated(in_groups, 4, args=[backend, CALLS])

    assert {} == deviations(expected, found)


def in_a_mesh(
    backend: str, shape: list[int], calls: Sequence[Sequence[Any]]
) -> dict[str, dict[str, Answer]]:
    with job(backend) as device:
        names = tuple(f"dim{index}" for index in range(len(shape)))
        mesh = init_device_mesh("cuda", tuple(shape), mesh_dim_names=names)
        every = [Call(*call) for call in calls]
        return {name: made(every, device, mesh[name].get_group()) for name in names}


@pytest.mark.parametrize("shape", [[2], [2, 2]], ids=["1d", "2d"])
def test_every_collective_works_in_each_dimension_of_a_mesh(
    backend: str, shape: list[int], deviations: Callable[..., Any]
) -> None:
    world = 2 ** len(shape)
    found = testing.emulated(in_a_mesh, world, args=[backend, shape, CALLS])

    for index in range(len(shape)):
        theirs = [each[f"dim{index}"] for each in found]
        places = [each // 2 ** (len(shape) - 1 - index) % 2 for each in range(world)]
        expected = [promised(CALLS, 2, place) for place in places]

        assert {} == deviations(expected, theirs)


def on_streams(backend: str, calls: Sequence[Sequence[Any]]) -> dict[str, Answer]:
    with job(backend) as device:
        other = dist.new_group()
        found = {}
        for call in [Call(*each) for each in calls]:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[call.label] = late(call, device, other)
        return found


def late(call: Call, device: torch.device, other: dist.ProcessGroup) -> Answer:
    """Make a call whose inputs are written just before it, in the current stream."""
    operation = EVERY[call.operation]
    place = call.place(dist.get_rank(), dist.get_world_size())
    given = [tensor.pin_memory() for tensor in operation.before(place)]
    buffers = [torch.empty_like(tensor, device=device) for tensor in given]
    after = [torch.empty_like(tensor).pin_memory() for tensor in given]
    # The stream gets to the copies only when an operation that is not late is over.
    for _ in range(2):
        dist.all_gather_single(
            torch.empty(2, device=device), torch.empty(1, device=device), other
        )
    for buffer, tensor in zip(buffers, given, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    answered = issue(call, place, buffers)
    for tensor, buffer in zip(after, buffers, strict=True):
        tensor.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return answered or b"".join(map(octets, after))


def test_a_collective_has_its_place_in_the_current_stream(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [call._replace(form=form) for call in CALLS for form in ("sync", "wait")]

    expected = [promised(calls, 2, each) for each in range(2)]
    found = testing.emulated(on_streams, 2, args=[backend, calls], faults=LATE)

    assert {} == deviations(expected, found)


def inexact(backend: str) -> list[bytes]:
    with job(backend) as device:
        found = []
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            mine = torch.arange(1, 1001, dtype=torch.float64) / (3 + rank())
            tensor = mine.to(dtype).to(device)
            dist.all_reduce(tensor)
            found.append(octets(tensor))
        return found


def test_all_ranks_have_the_same_bits_of_an_inexact_sum(backend: str) -> None:
    found = testing.emulated(inexact, 4, args=[backend])

    assert [found[0]] * 4 == found
