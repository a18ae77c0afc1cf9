"""Every kind of fault, for every operation that can have it: what a rank sees."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.emulator.leftovers import eventually, is_dead
from tests.emulator.walk import (
    OPERATIONS,
    ROUNDS,
    Walk,
    in_second_round,
    timed_walk,
    walk,
)
from weightsync import testing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(120)]

DELAY = 0.05


def in_the_second_round(action: str, ranks: str = "") -> str:
    """Let every operation of the second round go wrong."""
    return "\n".join(
        f"{name}@{ranks}n={in_second_round(name)}:{action}" for name in OPERATIONS
    )


# What the ranks of a test do.


def put(rounds: int, own: bool) -> list[int]:
    """Put to the peer or to the rank itself; return what each put returned."""
    rank = Walk()
    rank.allocate()
    rank.begin()
    peer = rank.rank if own else rank.peer
    for _ in range(rounds):
        rank.attempt("put", lambda: rank.put_to(peer))
    return rank.codes["put"]


def put_to_the_dead() -> str:
    """Put once; then rank 1 dies, and rank 0 puts again."""
    rank = Walk()
    rank.allocate()
    rank.begin()
    rank.put()
    if rank.rank == 1:
        rank.store.set("number", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    dead = int(rank.store.get("number"))
    assert eventually(lambda: is_dead(dead))
    rank.attempt("put", lambda: rank.put_to(1))
    return f"the put to {dead} completed"


def wait_for_each_other() -> None:
    """Call a collective of torch in rank 0, and receive from it in rank 1."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl2")
    number = torch.tensor([1.0]).cuda()
    dist.all_reduce(number)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
    else:
        dist.recv(number, 0)
    torch.cuda.synchronize()


def allocate(sizes: list[int]) -> list[bool]:
    """Allocate on a device through torch; return which of them could be."""
    import torch

    kept, found = [], []
    for size in sizes:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            found.append(False)
        else:
            found.append(True)
    return found


def reduce_thrice() -> list[float]:
    """All-reduce through torch three times; return how long each took."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl2")
    number = torch.tensor([1]).cuda()
    found = []
    for _ in range(3):
        began = time.monotonic()
        dist.all_reduce(number)
        torch.cuda.synchronize()
        found.append(time.monotonic() - began)
    dist.destroy_process_group()
    return found


def open_window() -> str:
    """Make a window through torch, and say what came of it."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl2", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    try:
        backend.new_window(memory)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "a window"


# fail


def test_every_operation_fails_with_the_code_that_is_asked_for() -> None:
    faults = in_the_second_round("fail=3")
    # It has a code of its own.
    faults = faults.replace("malloc@n=3:fail=3", "malloc@n=3:fail=2")
    # What did not grow is not destroyed.
    faults = faults.replace("destroy@n=6", "destroy@n=5")
    expected = {name: [0, 3, 0] for name in OPERATIONS} | {"malloc": [0, 2, 0]}

    assert [expected] * 2 == testing.emulated(walk, 2, faults=faults)


def test_torch_raises_what_a_call_returns() -> None:
    found = testing.outcomes(reduce_thrice, 2, faults="all_reduce@n=2:fail=6")

    assert [1, 1] == [each.exit_code for each in found]
    for each in found:
        assert (
            "fails a call with code 6, as the fault 'all_reduce@n=2:fail=6' asks"
            in (each.output)
        )
        assert "remote process exited or there was a network error" in each.output


# delay


def test_every_operation_takes_longer_where_a_delay_is_asked_for() -> None:
    first, second = testing.emulated(
        timed_walk, 2, faults=in_the_second_round(f"delay={DELAY}", "rank=1,")
    )

    late = [name for name in OPERATIONS if second[name][1] >= DELAY]
    assert list(OPERATIONS) == late
    quick = [
        name for name in OPERATIONS if min(second[name][0], second[name][2]) < DELAY
    ]
    assert list(OPERATIONS) == quick
    # Alone it does these, and is not delayed.
    own = ("malloc", "mem_alloc", "register", "shrink")
    assert [True] * 4 == [first[name][1] < DELAY for name in own]


def test_a_collective_through_torch_waits_for_the_rank_that_is_late() -> None:
    found = testing.emulated(
        reduce_thrice, 2, faults=f"all_reduce@rank=1,n=2:delay={DELAY}"
    )

    for seconds in found:
        assert seconds[1] >= DELAY


# stall: see also test_killed.py


def test_a_stalled_collective_is_diagnosed_by_whoever_waits_for_it() -> None:
    found = testing.outcomes(
        reduce_thrice,
        2,
        faults="all_reduce@rank=1,n=2:stall",
        hang_seconds=1,
        timeout=6,
    )

    assert [True, True] == [each.hung for each in found]
    assert "stalls an operation, as the fault 'all_reduce@rank=1,n=2:stall'" in (
        found[1].output
    )
    assert "waits for rank 1 to come to collective 1" in found[0].output


# network


@pytest.mark.parametrize("faults", ["network=0-1", "network=*"])
def test_puts_through_a_network_arrive(faults: str) -> None:
    assert [[0, 0]] * 2 == testing.emulated(put, 2, args=[2, False], faults=faults)


def test_a_put_to_a_dead_rank_completes_in_the_memory_that_is_left() -> None:
    found = testing.outcomes(put_to_the_dead, 2)

    assert -signal.SIGKILL == found[1].exit_code
    assert found[0].ok
    assert "completed" in found[0].result


def test_a_put_to_a_dead_rank_never_completes_through_a_network() -> None:
    found = testing.outcomes(put_to_the_dead, 2, faults="network=0-1", hang_seconds=1)

    assert -signal.SIGKILL == found[1].exit_code
    assert found[0].hung
    assert "for the network to complete 1 of 1 puts" in found[0].output
    assert "is dead" in found[0].output


# Hangs that no fault makes


def test_a_hang_in_torch_is_told_by_rank_operation_and_call_site() -> None:
    found = testing.outcomes(wait_for_each_other, 2, hang_seconds=1)
    first, second = (each.output for each in found)

    assert [86, 86] == [each.exit_code for each in found]
    assert "rank 0 of 2" in first
    assert (
        "ncclAllReduce of 1 float32 (maximum), called from libtorch_cuda.so+0x" in first
    )
    assert "waits for rank 1 to come to collective 1 of this communicator" in first
    assert "rank 1 of 2" in second
    assert "ncclRecv of 1 float32" in second
    assert "waits for rank 0" in second


# memory


def test_a_device_has_no_more_memory_than_is_asked_for() -> None:
    found = testing.emulated(
        *(allocate, 1),
        args=[[20 << 20, 20 << 20, 32]],
        faults="out-of-memory=24MiB",
    )

    assert [[True, False, True]] == found


def test_one_allocation_fails_and_torch_tries_again() -> None:
    # torch empties its cache after the first failure, and asks once more.
    once = testing.emulated(
        allocate, 1, args=[[32, 32 << 20]], faults="malloc@n=2:fail=2"
    )
    twice = testing.emulated(
        *(allocate, 1),
        args=[[32, 32 << 20, 32 << 20]],
        faults="malloc@n=2:fail=2; malloc@n=3:fail=2",
    )

    assert [[True, True]] == once
    assert [[True, False, True]] == twice


# no-symmetric


def test_torch_gets_no_window_without_symmetric_support() -> None:
    plain = testing.emulated(open_window, 2)
    found = testing.emulated(open_window, 2, faults="no-symmetric")

    assert ["a window"] * 2 == plain
    assert ["a window"] * 2 != found


# Probabilities, files, several entries


def test_a_probability_hits_the_same_operations_in_every_run() -> None:
    faults = "put@p=0.5,seed=7:fail=6; signal:delay=0"
    once = testing.emulated(put, 2, args=[20, True], faults=faults)
    again = testing.emulated(put, 2, args=[20, True], faults=faults)
    other = testing.emulated(
        put, 2, args=[20, True], faults=faults.replace("seed=7", "seed=8")
    )

    assert once == again
    assert once != other
    assert once[0] != once[1]
    assert {0, 6} == set(once[0])


def test_faults_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("# two of them\nput@rank=0,n=1:fail=6\nput@rank=1,n=2:fail=7\n")
    found = testing.emulated(put, 2, args=[3, True], faults=f"@{file}")

    assert [[6, 0, 0], [0, 7, 0]] == found


def test_the_first_entry_that_matches_decides() -> None:
    found = testing.emulated(
        put, 2, args=[4, True], faults=["put@n=2:fail=5", "put@from=2:fail=6"]
    )

    assert [[0, 5, 6, 6]] * 2 == found


def test_all_rounds_are_walked() -> None:
    found = testing.emulated(walk, 2)

    assert [dict.fromkeys(OPERATIONS, [0] * ROUNDS)] * 2 == found
