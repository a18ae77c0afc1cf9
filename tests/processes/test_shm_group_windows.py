"""c10d windows over shared memory: put, signal, wait, attributes, bounds, futures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WindowAccessType

import weightsync
from tests.processes import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes.harness import Control, Processes


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    groups = ranks.form(2)
    yield groups
    ranks.end(groups)


def test_a_put_arrives_with_its_signal(pair: list[Any]) -> None:
    (source, _), (target, memory) = ranks.windows(pair, 64)
    source.put(torch.arange(10, dtype=torch.uint8), 1, 5, False)
    target.wait_signal(0, False, ranks.wait_options(5))

    assert [0] * 5 + list(range(10)) + [0] * 49 == memory.tolist()


def test_offsets_count_elements_of_the_windows_dtype(pair: list[Any]) -> None:
    (source, _), (target, memory) = ranks.windows(pair, 8, torch.float64)
    source.put(torch.tensor([1.5, -2.0], dtype=torch.float64), 1, 6, False)
    target.wait_signal(0, False, ranks.wait_options(5))

    assert [0.0] * 6 + [1.5, -2.0] == memory.tolist()


def test_a_rank_puts_to_itself(pair: list[Any]) -> None:
    window, memory = ranks.windows(pair, 4)[1]
    window.put(torch.tensor([9], dtype=torch.uint8), 1, 3, False)
    window.wait_signal(1, False, ranks.wait_options(5))

    assert [0, 0, 0, 9] == memory.tolist()


def test_each_put_and_each_signal_counts_once(pair: list[Any]) -> None:
    (source, _), (target, _) = ranks.windows(pair, 4)
    one = torch.ones(1, dtype=torch.uint8)
    for _ in range(3):
        source.put(one, 1, 0, True).wait()
    for _ in range(2):
        source.signal(1, False)

    assert 5 == target.available_signals(0)
    for left in (4, 3, 2, 1, 0):
        target.wait_signal(0, False, ranks.wait_options(5))

        assert left == target.available_signals(0)
    with pytest.raises(weightsync.TimedOutError, match="1 of 1 from rank 0"):
        target.wait_signal(0, False, ranks.wait_options(0.05))


def test_signals_are_taken_together_or_not_at_all() -> None:
    groups = ranks.form(3)
    windows = ranks.windows(groups, 4)
    windows[0][0].signal(2, False)
    target = windows[2][0]
    with pytest.raises(weightsync.TimedOutError, match="1 of 1 from rank 1"):
        target.wait_signals([0, 1], [1, 1], ranks.wait_options(0.05).timeout, False)

    assert [1, 0] == [target.available_signals(rank) for rank in range(2)]
    windows[1][0].signal(2, False)
    target.wait_signals([0, 1], [1, 1], ranks.wait_options(5).timeout, False)

    assert [0, 0] == [target.available_signals(rank) for rank in range(2)]
    ranks.end(groups)


def test_windows_are_separate_and_only_the_own_memory_can_be_mapped(
    pair: list[Any],
) -> None:
    window, memory = ranks.windows(pair, 4)[0]

    assert WindowAccessType.SEPARATE == window.get_attr(0).access_type
    assert WindowAccessType.SEPARATE == window.get_attr(1).access_type
    assert memory.data_ptr() == window.map_remote_tensor(0).data_ptr()
    with pytest.raises(weightsync.UnsupportedError, match="SEPARATE"):
        window.map_remote_tensor(1)
    with pytest.raises(weightsync.UnsupportedError):
        window.map_remote_tensor(2)
    with pytest.raises(weightsync.PlanError, match="no rank 2"):
        window.get_attr(2)


@pytest.mark.parametrize(
    ("offset", "count"), [(0, 9), (8, 1), (-1, 1), (2**62, 1), (2**63 - 1, 2), (7, 2)]
)
def test_a_put_outside_the_window_moves_nothing(
    offset: int, count: int, pair: list[Any]
) -> None:
    (source, _), (target, memory) = ranks.windows(pair, 8, torch.int64)
    data = torch.ones(count, dtype=torch.int64)
    with pytest.raises(weightsync.PlanError, match="leaves the window of rank 1"):
        source.put(data, 1, offset, False)

    assert 0 == target.available_signals(0)
    assert [0] * 8 == memory.tolist()


def test_a_put_of_nothing_signals(pair: list[Any]) -> None:
    (source, _), (target, _) = ranks.windows(pair, 8)
    source.put(torch.empty(0, dtype=torch.uint8), 1, 8, False)

    assert 1 == target.available_signals(0)


def test_a_put_of_another_dtype_or_a_strided_tensor_is_refused(pair: list[Any]) -> None:
    (window, _), _other = ranks.windows(pair, 8)
    with pytest.raises(weightsync.PlanError, match=r"Float into a window of Byte"):
        window.put(torch.ones(1), 1, 0, False)
    with pytest.raises(weightsync.PlanError, match="contiguous"):
        window.put(torch.ones(4, 2, dtype=torch.uint8)[:, 0], 1, 0, False)
    for peer in (-1, 2, 2**40):
        with pytest.raises(weightsync.PlanError, match="no rank"):
            window.put(torch.ones(1, dtype=torch.uint8), peer, 0, False)
        with pytest.raises(weightsync.PlanError, match="rank"):
            window.signal(peer, False)
        with pytest.raises(weightsync.PlanError, match="rank"):
            window.wait_signal(peer, False, ranks.wait_options(5))


def test_memory_that_peers_cannot_map_is_refused(pair: list[Any]) -> None:
    with pytest.raises(weightsync.UnsupportedError, match="allocate_tensor"):
        pair[0].new_window(torch.zeros(8, dtype=torch.uint8))


def test_a_view_into_an_allocation_can_be_a_window(pair: list[Any]) -> None:
    def create(group: Any) -> tuple[Any, torch.Tensor]:
        cpu = torch.device("cpu")
        memory = group.allocate_tensor(32, dtype=torch.uint8, device=cpu)
        return group.new_window(memory[8:16]), memory

    (source, _), (target, memory) = ranks.in_threads(
        [lambda g=g: create(g) for g in pair]
    )
    source.put(torch.full((8,), 7, dtype=torch.uint8), 1, 0, False)
    target.wait_signal(0, False, ranks.wait_options(5))

    assert [0] * 8 + [7] * 8 + [0] * 16 == memory.tolist()
    with pytest.raises(weightsync.PlanError, match="8 bytes"):
        source.put(torch.ones(9, dtype=torch.uint8), 1, 0, False)


def test_waits_end_at_the_timeout_however_it_is_given() -> None:
    groups = ranks.form(2, seconds=0.2)
    window, _ = ranks.windows(groups, 4)[0]

    def timed(wait: Any) -> float:
        started = time.monotonic()
        with pytest.raises(weightsync.TimedOutError):
            wait()
        return time.monotonic() - started

    timeout = ranks.wait_options(0.2).timeout

    assert 0.2 <= timed(lambda: window.wait_signal(1, False)) < 1
    assert (
        0.1 <= timed(lambda: window.wait_signal(1, False, ranks.wait_options(0.1))) < 1
    )
    late = window.wait_signal(1, True, ranks.wait_options(30))

    assert 0.2 <= timed(lambda: late.wait(timeout)) < 1
    assert 0.2 <= timed(lambda: groups[0].barrier().wait()) < 1
    ranks.end(groups)


def test_work_tells_its_state_and_its_error(pair: list[Any]) -> None:
    (source, _), (target, _) = ranks.windows(pair, 4)
    waiting = target.wait_signal(0, True, ranks.wait_options(5))

    assert not waiting.is_completed()
    source.signal(1, False)
    waiting.wait()

    assert (True, True) == (waiting.is_completed(), waiting.is_success())

    failing = target.wait_signal(0, True, ranks.wait_options(0.05))
    with pytest.raises(weightsync.TimedOutError):
        failing.wait()

    assert (True, False) == (failing.is_completed(), failing.is_success())


def test_futures_of_work_are_completed_without_anybody_waiting(pair: list[Any]) -> None:
    (source, _), (target, _) = ranks.windows(pair, 4)
    future = target.wait_signal(0, True, ranks.wait_options(5)).get_future()
    result = target.wait_signal(0, True, ranks.wait_options(5)).get_future_result()
    called: list[object] = []
    future.then(lambda done: called.append(done.value()))

    assert not future.done()
    source.signal(1, False)
    source.signal(1, False)

    assert [] == future.wait()
    assert 0 == result.wait()  # WorkResult.SUCCESS
    assert [[]] == called

    late = target.wait_signal(0, True, ranks.wait_options(0.05))
    with pytest.raises(Exception, match="timed out waiting for signals"):
        late.get_future().wait()
    late = target.wait_signal(0, True, ranks.wait_options(0.05))

    assert 1 == late.get_future_result().wait()  # WorkResult.TIMEOUT


def _rank(control: Control, rank: int, address: str) -> Any:
    port = int(address.rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("weightsync-shm", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    assert group.supports_window
    cpu = torch.device("cpu")
    memory = group._get_backend(cpu).allocate_tensor(8, dtype=torch.float32, device=cpu)
    window = group.new_window(memory)
    if rank == 0:
        window.put(torch.tensor([1.0, 2.0]), 1, 3, False)
        window.signal(1, True).wait()
    else:
        window.wait_signal(0, True).wait()
        window.wait_signal(0, True).get_future().wait()
    dist.barrier()
    try:
        window.map_remote_tensor(1 - rank)
    except NotImplementedError as error:
        refused = "SEPARATE" in str(error)
    else:
        refused = False
    window.tensor_deregister()
    dist.destroy_process_group()
    return memory.tolist(), refused


def test_the_same_through_torch_distributed(processes: Processes, address: str) -> None:
    children = [processes.start(_rank, rank, address) for rank in range(2)]

    assert [
        ([0.0] * 8, True),
        ([0.0] * 3 + [1.0, 2.0] + [0.0] * 3, True),
    ] == [child.result() for child in children]
