"""What becomes of the work of ``weightsync-nccl2``, and of the tensors in it."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, error_of, job, rank, world
from weightsync import testing

BACKEND: Final = "weightsync-nccl2"

SLOW: Final = "*:delay=0.2"
"""Every operation of NCCL takes longer than what the test does meanwhile."""

COUNT: Final = 1024


def mine(device: torch.device, count: int = COUNT) -> torch.Tensor:
    """Return numbers that tell the rank."""
    return torch.arange(float(count)).add(1000 * rank()).to(device)


def everybody() -> torch.Tensor:
    """Return what the ranks have together."""
    return torch.cat([torch.arange(float(COUNT)) + 1000 * of for of in range(world())])


def ready(device: torch.device) -> None:
    """Have a communicator, and nothing else to do."""
    dist.all_reduce(mine(device, 1))
    torch.cuda.synchronize()


def dropped() -> list[bool]:
    with job(BACKEND) as device:
        ready(device)
        output = torch.empty(world() * COUNT, device=device)
        given = mine(device)
        work = dist.all_gather_single(output, given, async_op=True)
        assert work is not None
        del given
        # Would take the memory of what was given, were that free.
        others = [torch.zeros(COUNT).to(device) for _ in range(4)]
        work.wait()
        return [torch.equal(output.cpu(), everybody()), len(others) == 4]


def test_a_tensor_that_is_dropped_at_once_is_there_until_it_was_read() -> None:
    found = testing.emulated(dropped, 2, faults=SLOW)

    assert [[True, True]] * 2 == found


def forgotten() -> list[Any]:
    with job(BACKEND) as device:
        ready(device)
        before = torch.cuda.memory_allocated()
        output = torch.empty(world() * COUNT, device=device)
        dist.all_gather_single(output, mine(device), async_op=True)
        during = torch.cuda.memory_allocated() - before
        torch.cuda.synchronize()
        right = torch.equal(output.cpu(), everybody())
        del output
        # Whatever is issued next sees to what is over.
        dist.all_reduce(torch.empty(0, device=device))
        after = torch.cuda.memory_allocated() - before
        return [during, right, after]


def test_work_that_nobody_waits_for_is_done_and_let_go() -> None:
    found = testing.emulated(forgotten, 2, faults=SLOW)

    assert [[3 * 4 * COUNT, True, 0]] * 2 == found


def waited() -> list[Any]:
    with job(BACKEND) as device:
        ready(device)
        before = torch.cuda.memory_allocated()
        works = [dist.all_reduce(mine(device), async_op=True) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()
        completed = [work is not None and work.is_completed() for work in works]
        work = None
        works.clear()
        return [completed[-1], torch.cuda.memory_allocated() - before]


def test_what_a_stream_waits_for_keeps_no_memory() -> None:
    found = testing.emulated(waited, 2, faults=SLOW)

    assert [[False, 0]] * 2 == found


def results() -> list[Any]:
    with job(BACKEND) as device:
        group = dist.group.WORLD
        assert group is not None
        tensors = [mine(device), mine(device)]
        output = torch.empty(world() * COUNT, device=device)
        reduced = group.allreduce([tensors[0]])
        gathered = group.all_gather_single(output, tensors[1])
        reduced.wait()
        gathered.wait()
        torch.cuda.synchronize()
        return [
            [each.data_ptr() for each in reduced.result()] == [tensors[0].data_ptr()],
            [each.data_ptr() for each in gathered.result()] == [output.data_ptr()],
            [each.is_completed() and each.is_success() for each in (reduced, gathered)],
        ]


def test_the_result_of_work_is_what_it_wrote() -> None:
    found = testing.emulated(results, 2)

    assert [[True, True, [True, True]]] * 2 == found


def futures() -> list[Any]:
    with job(BACKEND) as device:
        ready(device)
        tensor = mine(device)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        # The callback has a stream of its own, which waits for the operation.
        then = work.get_future().then(lambda future: future.value()[0].cpu().tolist())
        outcome = work.get_future_result()
        found = then.wait()
        torch.cuda.synchronize()
        return [found[:2], outcome.wait() == 0]


def test_a_callback_sees_what_an_operation_wrote() -> None:
    found = testing.emulated(futures, 2, faults=SLOW)

    assert [[[1000.0, 1002.0], True]] * 2 == found


def reused() -> list[float]:
    with job(BACKEND) as device:
        ready(device)
        tensor = mine(device)
        other = torch.zeros(COUNT).pin_memory()
        if rank() == 0:
            work = dist.isend(tensor, 1)
            assert work is not None
            work.get_future().wait()
            tensor.copy_(other, non_blocking=True)
        else:
            dist.recv(tensor, 0)
        return tensor.cpu().tolist()[:2]


def test_a_future_without_a_result_is_waited_for_as_well() -> None:
    found = testing.emulated(reused, 2, faults=SLOW)

    assert [[0.0, 0.0], [0.0, 1.0]] == found


def batched() -> list[Any]:
    with job(BACKEND) as device:
        sent, other = mine(device), torch.arange(4, dtype=torch.int16).to(device)
        received = torch.empty_like(sent)
        peer = 1 - rank()

        def exchange(refused: bool) -> None:
            operations = [
                dist.P2POp(dist.isend, sent, peer),
                dist.P2POp(dist.irecv, received, peer),
            ]
            if refused:
                operations.append(dist.P2POp(dist.isend, other, peer))
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        error = error_of(lambda: exchange(True))
        exchange(False)
        return [error, received.tolist()[0], *mine_summed(device)]


def mine_summed(device: torch.device) -> list[float]:
    """Return the sum of the ranks' first numbers."""
    tensor = mine(device, 1)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_batch_with_a_refused_operation_does_nothing() -> None:
    found = testing.emulated(batched, 2)

    said = (
        "TypeError: NCCL has no type for Short: weightsync-nccl2 cannot take the tensor"
    )
    assert [[said, 1000.0, 1000.0], [said, 0.0, 1000.0]] == found


def unended() -> list[Any]:
    with job(BACKEND) as device:
        group = dist.group.WORLD
        assert group is not None
        tensor = mine(device, 1)
        group._start_coalescing(device)
        group.allreduce([tensor])
        error = error_of(lambda: group._start_coalescing(device))
        return [error, *mine_summed(device), *tensor.tolist()]


def test_a_batch_that_was_never_ended_is_given_up() -> None:
    found = testing.emulated(unended, 2)

    said = (
        "RuntimeError: a batch of 1 operations was never ended: none of them was "
        "issued; it is given up"
    )
    assert [[said, 1000.0, 1000.0 * each] for each in range(2)] == found


def ordered() -> list[Any]:
    with job(BACKEND) as device:
        last = torch.channels_last
        image = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=last)
        summed = image.to(device)
        dist.all_reduce(summed)
        expected = 2 * image
        mixed = [torch.empty(1, 2, 3, 4, device=device) for _ in range(world())]
        return [
            torch.equal(summed.cpu(), expected),
            error_of(lambda: dist.all_gather(mixed, summed)),
            *mine_summed(device),
        ]


def test_tensors_of_one_call_are_in_one_order() -> None:
    found = testing.emulated(ordered, 2)

    said = (
        "ValueError: all_gather: all tensors must be contiguous in the same memory "
        "format"
    )
    assert [[True, said, 1000.0]] * 2 == found


def alone() -> list[str]:
    with job(BACKEND) as device:
        group = dist.group.WORLD
        assert group is not None
        tensor = mine(device)
        return [
            error_of(lambda: group.send([tensor], rank(), 0)),
            error_of(lambda: group.recv([tensor], rank(), 0)),
            *map(str, mine_summed(device)),
        ]


def test_a_message_to_oneself_is_refused_outside_of_a_batch() -> None:
    found = testing.emulated(alone, 2)

    said = "can send to itself only in a batch with the receive"
    expected = [
        [f"ValueError: {call}: rank {each} {said}" for call in ("send", "recv")]
        for each in range(2)
    ]
    assert [[*each, "1000.0"] for each in expected] == found


def host(blocking: bool) -> list[bool]:
    from weightsync.backend import NcclOptions

    options = NcclOptions()
    options.blocking_wait = blocking
    with job(BACKEND, pg_options=options) as device:
        ready(device)
        work = dist.all_reduce(mine(device), async_op=True)
        assert work is not None
        before = work.is_completed()
        work.wait()
        return [before, work.is_completed()]


@pytest.mark.parametrize("blocking", [False, True])
def test_the_host_waits_if_the_group_is_so_made(blocking: bool) -> None:
    found = testing.emulated(host, 2, args=[blocking], faults=SLOW)

    assert [[False, blocking]] * 2 == found


def promptly() -> list[Any]:
    with job(BACKEND) as device:
        ready(device)
        work = dist.all_reduce(mine(device), async_op=True)
        assert work is not None
        # The host waits when it is given a time, and this is enough.
        return [work.wait(TIMEOUT), work.is_completed()]


def test_the_host_waits_for_as_long_as_it_is_told() -> None:
    found = testing.emulated(promptly, 2, faults=SLOW)

    assert [[True, True]] * 2 == found
