"""Abort, shutdown and destroy: waiters are released, again does nothing."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import weightsync
from tests.processes import driven, ranks

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes


@pytest.mark.parametrize("ending", ["abort", "shutdown"])
def test_ending_the_group_releases_every_waiter(ending: str) -> None:
    groups = ranks.form(2)
    window, _ = ranks.windows(groups, 4)[0]
    errors: list[Exception] = []

    def wait(blocking: Any) -> None:
        try:
            blocking()
        except weightsync.WeightSyncError as error:
            errors.append(error)

    waits = [
        lambda: window.wait_signal(1, False, ranks.wait_options(30)),
        lambda: window.wait_signal(1, True, ranks.wait_options(30)).wait(),
        lambda: groups[0].barrier().wait(),
    ]
    threads = [threading.Thread(target=wait, args=(blocking,)) for blocking in waits]
    for thread in threads:
        thread.start()
    future = window.wait_signal(1, True, ranks.wait_options(30)).get_future()
    time.sleep(0.05)
    started = time.monotonic()
    getattr(groups[0], ending)()
    for thread in threads:
        thread.join(5)

    assert time.monotonic() - started < 1
    assert [weightsync.ClosedError] * 3 == [type(error) for error in errors]
    with pytest.raises(Exception, match="process group was"):
        future.wait()
    with pytest.raises(weightsync.PeerError, match="left the group"):
        ranks.windows([groups[1]], 4)
    ranks.end(groups)


def test_endings_are_idempotent_in_any_order() -> None:
    calls = ["abort", "shutdown"]
    for first in calls:
        for second in calls:
            groups = ranks.form(2)
            window, memory = ranks.windows(groups, 4)[0]
            for ending in (first, second, first):
                getattr(groups[0], ending)()
            with pytest.raises(weightsync.ClosedError):
                window.signal(1, False)
            with pytest.raises(weightsync.ClosedError):
                groups[0].barrier().wait()
            with pytest.raises(weightsync.ClosedError):
                groups[0].get_reconfigure_handle()

            assert [0] * 4 == memory.tolist()
            groups[1].shutdown()


def test_an_abort_stops_a_put_that_is_under_way() -> None:
    groups = ranks.form(2)
    (source, _), _ = ranks.windows(groups, 256 << 20)
    data = torch.ones(256 << 20, dtype=torch.uint8)
    work = source.put(data, 1, 0, True)
    started = time.monotonic()
    groups[0].abort()

    assert time.monotonic() - started < 1
    with pytest.raises(weightsync.ClosedError):
        work.wait()
    groups[1].shutdown()


def test_abort_hooks_are_called_once() -> None:
    (group,) = ranks.form(1)
    called: list[int] = []
    group.register_abort_hook(1, lambda: called.append(1))
    group.register_abort_hook(2, lambda: called.append(2))
    group.unregister_abort_hook(2)
    group.abort()
    group.abort()

    assert [1] == called


def test_groups_that_end_leave_no_descriptor_mapping_or_thread() -> None:
    def cycle() -> None:
        groups = ranks.form(2)
        (source, _), (target, _) = ranks.windows(groups, 1 << 16)
        work = target.wait_signal(0, True, ranks.wait_options(5))
        source.put(torch.ones(8, dtype=torch.uint8), 1, 0, True).wait()
        work.get_future().wait()
        ranks.end(groups)

    for _ in range(10):
        cycle()
    before = driven.census()
    for _ in range(50):
        cycle()
    after = driven.census()

    assert after.descriptors - before.descriptors <= 2
    assert after.mappings - before.mappings <= 2
    assert after.threads - before.threads <= 2


def _rank(control: Control, rank: int, address: str, ending: str) -> float:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address.rpartition(":")[2])
    dist.init_process_group("weightsync-shm", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    memory = weightsync.Window.allocate(group, 64)
    window = group.new_window(memory)
    if rank == 1:
        control.say("ready")
        control.hear()
        os._exit(0)  # without destroying anything
    control.hear()
    started = time.monotonic()
    if ending == "wait":
        with pytest.raises(weightsync.PeerError, match="rank 1"):
            window.wait_signal(1, True).wait()
    if ending == "abort":
        group.abort()
    dist.destroy_process_group()
    return time.monotonic() - started


@pytest.mark.parametrize("ending", ["wait", "abort", "destroy"])
def test_a_group_whose_peer_died_is_destroyed_soon(
    ending: str, processes: Processes, address: str
) -> None:
    children = [processes.start(_rank, rank, address, ending) for rank in range(2)]
    children[1].hear()
    children[1].kill()
    children[1].join()
    children[0].say("go")

    assert children[0].result() < 5
    assert 0 == children[0].join()


def test_a_forked_child_cannot_end_the_group_of_its_parent() -> None:
    groups = ranks.form(2)
    (source, _), (target, memory) = ranks.windows(groups, 4)
    pid = os.fork()
    if pid == 0:
        try:
            groups[0].shutdown()
            groups[1].abort()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    source.put(torch.full((4,), 9, dtype=torch.uint8), 1, 0, False)
    target.wait_signal(0, False, ranks.wait_options(5))

    assert [9] * 4 == memory.tolist()
    ranks.end(groups)
