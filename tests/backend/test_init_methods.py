"""How ranks find each other, again and again, and how many groups a process has."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import meeting
from tests.conformance.group import TIMEOUT, job, rank, world
from tests.conformance.members import exchanged, expected, leave_together
from tests.conformance.windows import numbers
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND: Final = "weightsync-nccl2"
TURNS: Final = 3

UNBOUND: Final[dict[str, Any]] = {"device_id": None}
"""Opens a group whose parts meet in the store when they are first used."""


# One after another


def methods(kind: str, place: str) -> dict[str, Any]:
    """Return what ``init_process_group`` is told, and set what it finds itself."""
    if kind == "env":
        os.environ["MASTER_PORT"] = place
        return {"init_method": "env://"} if rank() else {}
    where = f"127.0.0.1:{place}" if kind == "tcp" else place
    return {
        "init_method": f"{kind}://{where}",
        "rank": rank(),
        "world_size": world(),
    }


def one_turn(**options: Any) -> list[Any]:
    """Open a group, use it and a part of it, and destroy both."""
    with job(BACKEND, **UNBOUND, **options) as device:
        found = [exchanged(device)]
        part = dist.new_group([2, 1])
        found.append(exchanged(device, part) if rank() else None)
        # Rank 0 holds the store by which the others meet in that.
        dist.barrier()
    return found


def again_and_again(kind: str, places: list[str]) -> list[Any]:
    store, found = meeting(), []
    for turn, place in enumerate(places):
        found += one_turn(**methods(kind, place))
        # The next place may be the same, which everybody has to have left.
        leave_together(world(), dist.PrefixStore(f"{turn}/", store))
    leave_together(world(), dist.PrefixStore("end/", store))
    return found


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
def test_ranks_meet_again_at_the_same_place_and_at_another(
    kind: str, same: bool, tmp_path: Path
) -> None:
    def place(turn: int) -> str:
        return str(tmp_path / f"{turn}") if kind == "file" else free_port()

    places = [place(0)] * TURNS if same else [place(turn) for turn in range(TURNS)]
    found = testing.emulated(again_and_again, 3, args=[kind, places])

    for process in range(3):
        each = [expected([0, 1, 2], process), expected([1, 2], process)]
        assert each * TURNS == found[process]


def others_each_time() -> list[Any]:
    store, found = meeting(), []
    for turn, members in enumerate([[0, 1, 2], [2, 0], [1, 2, 0], [2], [0, 1]]):
        if rank() in members:
            place = {
                "store": dist.PrefixStore(f"{turn}/", store),
                "rank": members.index(rank()),
                "world_size": len(members),
            }
            with job(BACKEND, **UNBOUND, **place) as device:
                found.append(exchanged(device))
    leave_together(world(), dist.PrefixStore("end/", store))
    return found


def test_a_process_is_another_rank_of_another_world_each_time() -> None:
    found = testing.emulated(others_each_time, 3)

    worlds = [[0, 1, 2], [2, 0], [1, 2, 0], [2], [0, 1]]
    assert [
        [expected(each, process) for each in worlds if process in each]
        for process in range(3)
    ] == found


def after_an_abort() -> list[Any]:
    store, found = meeting(), []
    for turn in range(TURNS):
        place = dist.PrefixStore(f"{turn}/", store)
        context = job(BACKEND, **UNBOUND, store=place, rank=rank(), world_size=world())
        device = context.__enter__()
        found.append(exchanged(device))
        # What is under way when one rank aborts ends in the others as it may.
        dist.barrier()
        dist.distributed_c10d._abort_process_group()
        found.append(dist.is_initialized())
    leave_together(world(), dist.PrefixStore("end/", store))
    return found


def test_a_process_opens_a_group_after_it_aborted_one() -> None:
    found = testing.emulated(after_an_abort, 2)

    assert [[expected([0, 1], each), False] * TURNS for each in range(2)] == found


# Explicit stores


def stored(kind: str, path: str) -> list[Any]:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: dict[str, Callable[[], dist.Store]] = {
        "file": lambda: dist.FileStore(path, world()),
        "tcp": lambda: dist.TCPStore(address, port, world(), rank() == 0),
        "prefix": lambda: dist.PrefixStore("a", dist.PrefixStore("b/", meeting())),
    }
    store = stores[kind]()
    with job(
        BACKEND, **UNBOUND, store=store, rank=rank(), world_size=world()
    ) as device:
        found = exchanged(device)
    leave_together(world(), dist.PrefixStore("end/", store))
    return found


@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
def test_ranks_meet_in_a_store_that_they_are_given(kind: str, tmp_path: Path) -> None:
    found = testing.emulated(stored, 3, args=[kind, str(tmp_path / "store")])

    assert [expected([0, 1, 2], each) for each in range(3)] == found


def as_threads(ranks: int) -> list[list[int]]:
    """Ranks that are threads of one process, each of which has a GPU and a group."""
    from weightsync.backend import _C, NcclOptions

    store = dist.HashStore()
    found: dict[int, list[int]] = {}

    def take_part(number: int) -> None:
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        group = _C.ProcessGroupNccl(store, number, ranks, NcclOptions(TIMEOUT))
        total = numbers(number, 2).to(device)
        group.allreduce([total]).wait()
        found[number] = total.tolist()
        group.shutdown()

    threads = [threading.Thread(target=take_part, args=[each]) for each in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(number, []) for number in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_are_threads_of_one_process_meet_in_memory(ranks: int) -> None:
    (found,) = testing.emulated(as_threads, 1, args=[ranks])

    total = sum(range(ranks))
    assert [[total, total + ranks]] * ranks == found


# At once

KINDS: Final = ("weightsync-nccl2", "nccl2", "weightsync-shm", "gloo")


def used(kind: str, group: Any, device: torch.device) -> int:
    """Use a group of that kind; its sum, or none where it has no sums."""
    if kind == "weightsync-shm":
        group.barrier().wait()
        return -1
    total = numbers(rank() + 1, 1).to("cpu" if kind == "gloo" else device)
    dist.all_reduce(total, group=group)
    return int(total.cpu().item())


def side_by_side(first_to_end: int) -> list[list[int]]:
    with job(BACKEND, **UNBOUND) as device:
        groups = {kind: dist.new_group(backend=kind) for kind in KINDS}
        order = [*KINDS[first_to_end:], *KINDS[:first_to_end]]
        found = []
        for kind in order:
            found.append([used(each, group, device) for each, group in groups.items()])
            dist.destroy_process_group(groups.pop(kind))
        return [*found, [used(BACKEND, dist.group.WORLD, device)]]


@pytest.mark.parametrize("first_to_end", range(len(KINDS)))
def test_groups_of_many_backends_end_one_by_one(first_to_end: int) -> None:
    found = testing.emulated(side_by_side, 2, args=[first_to_end])

    sums = {kind: -1 if kind == "weightsync-shm" else 3 for kind in KINDS}
    ended = [*KINDS[first_to_end:], *KINDS[:first_to_end]]
    rounds = [
        [sums[kind] for kind in KINDS if kind not in ended[:turn]]
        for turn in range(len(KINDS))
    ]
    assert [[*rounds, [3]]] * 2 == found


COUNT: Final = 24


def members_of(index: int) -> list[int]:
    return [0, 1] if index % 2 else [1, 2]


def many(path: str) -> list[int]:
    store = dist.FileStore(path, world())
    place = {"store": store, "rank": rank(), "world_size": world()}
    with job(BACKEND, **UNBOUND, **place) as device:
        found, groups = [], []
        for index in range(COUNT):
            groups.append(dist.new_group(members_of(index)))
            if index % 3 == 2:
                dist.destroy_process_group(groups.pop(0))
        for group in groups:
            total = numbers(rank() + 1, 1).to(device)
            dist.all_reduce(total, group=group)
            found.append(int(total.cpu().item()))
        dist.barrier()
        return found


def test_a_process_is_in_many_groups_while_others_come_and_go(
    tmp_path: Path,
) -> None:
    found = testing.emulated(many, 3, args=[str(tmp_path / "store")])

    left = [members_of(index) for index in range(COUNT // 3, COUNT)]
    assert [
        [sum(members) + 2 if process in members else process + 1 for members in left]
        for process in range(3)
    ] == found
