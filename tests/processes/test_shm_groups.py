"""Groups of ``weightsync-shm`` that are made by c10d, out of some ranks or of jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.processes import ranks
from weightsync.backend import SHM, create_shm

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.harness import Control, Processes

TIMEOUT: Final = timedelta(seconds=20)
WORLD: Final = 4


def passed_on(group: Any, number: int) -> list[int]:
    """Put a number into the window of the next rank; the place, and what came."""
    backend = getattr(group, "_get_backend", lambda _: group)(torch.device("cpu"))
    place, size = backend.rank(), backend.size()
    memory = backend.allocate_tensor(1, dtype=torch.int64, device=torch.device("cpu"))
    window = backend.new_window(memory)
    window.put(torch.tensor([number]), (place + 1) % size, 0, False)
    window.wait_signal((place - 1) % size, False, ranks.wait_options(10))
    return [place, size, int(memory.item())]


def begin(rank: int, store: dist.Store, size: int = WORLD) -> None:
    """Open a default group, of another backend than the groups that are tested."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )


def end(control: Control, found: list[Any]) -> list[Any]:
    """Leave together: a group that is destroyed is left by its last rank."""
    control.say(found)
    control.hear()
    dist.destroy_process_group()
    return found


def all_of(
    processes: Processes, function: Any, path: Path, *args: object
) -> list[list[Any]]:
    """Run a function in every rank; what each found while all were there."""
    children = [
        processes.start(function, rank, str(path / "store"), *args)
        for rank in range(WORLD)
    ]
    found = [child.hear() for child in children]
    for child in children:
        child.say("end")
    for child in children:
        child.result()
    return found


def _nested(control: Control, rank: int, path: str) -> list[Any]:
    begin(rank, dist.FileStore(path, WORLD))
    outer = dist.new_group([3, 1], backend=SHM)
    same = dist.new_group([3, 1], backend=SHM)
    inner = dist.new_group([3], backend=SHM)
    found = []
    if rank in {1, 3}:
        found = [passed_on(outer, rank), passed_on(same, 10 + rank)]
    if rank == 3:
        found.append(passed_on(inner, rank))
    return end(control, found)


def test_groups_need_neither_rank_0_nor_other_members(
    processes: Processes, tmp_path: Path
) -> None:
    found = all_of(processes, _nested, tmp_path)

    assert [
        [],
        [[0, 2, 3], [0, 2, 13]],
        [],
        [[1, 2, 1], [1, 2, 11], [0, 1, 3]],
    ] == found


def _meets_late(control: Control, rank: int, path: str) -> list[Any]:
    store = dist.FileStore(path, WORLD)
    begin(rank, dist.PrefixStore("all/", store))
    if rank in {1, 3}:
        # Not before the others are through with making a group that is not theirs.
        store.wait(["0 went on", "2 went on"], TIMEOUT)
        group = dist.new_group([3, 1], backend=SHM)
        return end(control, passed_on(group, rank))
    dist.new_group([3, 1], backend=SHM)
    store.set(f"{rank} went on", "")
    return end(control, [])


def test_who_is_not_in_a_group_does_not_wait_for_it(
    processes: Processes, tmp_path: Path
) -> None:
    found = all_of(processes, _meets_late, tmp_path)

    assert [[], [0, 2, 3], [], [1, 2, 1]] == found


def _joined(control: Control, rank: int, path: str) -> list[Any]:
    """Two trainers and two generators, and a group of all that neither job knows."""
    store = dist.FileStore(path, WORLD)
    begin(rank % 2, dist.PrefixStore(f"job {rank // 2}/", store), 2)
    # The jobs count their groups alike, so these have the same name.
    own = dist.new_group(backend=SHM)
    bridges = [
        create_shm(
            dist.PrefixStore(f"bridge {each}/", store),
            rank=rank,
            size=WORLD,
            timeout=TIMEOUT,
        )
        for each in range(2)
    ]
    found = [passed_on(each, rank) for each in (*bridges, own)]
    for each in bridges:
        each.barrier().wait()
        each.shutdown()
    return end(control, found)


def test_a_group_joins_jobs_that_have_none_in_common(
    processes: Processes, tmp_path: Path
) -> None:
    found = all_of(processes, _joined, tmp_path)

    assert [
        [[0, 4, 3], [0, 4, 3], [0, 2, 1]],
        [[1, 4, 0], [1, 4, 0], [1, 2, 0]],
        [[2, 4, 1], [2, 4, 1], [0, 2, 3]],
        [[3, 4, 2], [3, 4, 2], [1, 2, 2]],
    ] == found


def _again(control: Control, rank: int, path: str, turns: int) -> list[Any]:
    store = dist.FileStore(path, WORLD)
    found: list[Any] = []
    for turn in range(turns):
        dist.init_process_group(
            f"cpu:{SHM}",
            store=dist.PrefixStore(f"{turn}/", store),
            rank=rank,
            world_size=WORLD,
            timeout=TIMEOUT,
        )
        found.append(passed_on(dist.group.WORLD, rank + 10 * turn))
        if turn < turns - 1:
            dist.barrier()
            dist.destroy_process_group()
    return end(control, found)


@pytest.mark.parametrize("turns", [1, 3])
def test_a_process_opens_and_destroys_a_group_again_and_again(
    processes: Processes, tmp_path: Path, turns: int
) -> None:
    found = all_of(processes, _again, tmp_path, turns)

    assert [
        [[rank, WORLD, (rank - 1) % WORLD + 10 * turn] for turn in range(turns)]
        for rank in range(WORLD)
    ] == found
