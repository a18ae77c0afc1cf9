"""Window: puts, signals and waits, awaited and blocking, over shared memory."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
import torch.distributed as dist

import weightsync
from tests.processes import ranks
from weightsync import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def windows(groups: list[Any], nbytes: int) -> list[Window]:
    def create(group: Any) -> Window:
        return Window(group, Window.allocate(group, nbytes))

    return ranks.in_threads([lambda g=g: create(g) for g in groups])


@pytest.fixture
def pair() -> Iterator[list[Window]]:
    groups = ranks.form(2)
    yield windows(groups, 64)
    ranks.end(groups)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


def test_any_contiguous_tensor_is_put_as_bytes(pair: list[Window]) -> None:
    source, target = pair
    for value in (
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.int64),
        torch.nn.Parameter(torch.tensor([[1 + 2j]])),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ):
        source.put(value, 1, offset=3).wait(5)
        target.wait_signal(0).wait(5)
        plain = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        flat = plain.reshape(-1).view(torch.uint8)

        assert torch.equal(flat, target.local[3 : 3 + flat.numel()])


def test_put_many_signals_once_for_each_row(pair: list[Window]) -> None:
    source, target = pair
    columns = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    word = torch.tensor([0x0102], dtype=torch.int16)
    runs = table([0, 1, 10, 3, 2, 4, 8], [1, 0, 0, 1, 2, 2, 2], [0, 0, 40, 0, 4, 4, 4])
    source.put_many([columns, word], runs, 1).wait(5)
    target.wait_signal(0, 4).wait(5)
    with pytest.raises(weightsync.TimedOutError):
        target.wait_signal(0).wait(0.05)
    expected = torch.zeros(64, dtype=torch.uint8)
    expected[0:2] = torch.tensor([2, 1])
    for row in range(3):
        expected[10 + 8 * row : 12 + 8 * row] = columns[row, 1:3]

    assert torch.equal(expected, target.local)


def test_put_many_of_no_rows_is_nothing(pair: list[Window]) -> None:
    source, target = pair
    source.put_many([], table(), 1).wait(5)
    with pytest.raises(weightsync.TimedOutError):
        target.wait_signal(0).wait(0.05)


@pytest.mark.parametrize(
    "row",
    [
        [0, 0, 57, 1, 8, 8, 8],
        [0, 1, 0, 1, 8, 8, 8],
        [0, 0, 0, 2, 8, 0, 57],
        [0, -1, 0, 1, 1, 1, 1],
        [0, 0, -1, 1, 1, 1, 1],
        [0, 0, 0, -1, 1, 1, 1],
        [0, 0, 0, 1, -1, 1, 1],
        [0, 0, 0, 2, 1, -1, 1],
        [0, 0, 0, 2**62, 2**62, 1, 2**62],
        [1, 0, 0, 1, 1, 1, 1],
        [-1, 0, 0, 1, 1, 1, 1],
    ],
)
def test_put_many_checks_every_run_before_any_byte_moves(
    row: list[int], pair: list[Window]
) -> None:
    source, target = pair
    good = [0, 0, 0, 1, 8, 8, 8]
    with pytest.raises(weightsync.PlanError):
        source.put_many([torch.ones(8, dtype=torch.uint8)], table(good, row), 1)
    with pytest.raises(weightsync.TimedOutError):
        target.wait_signal(0).wait(0.02)

    assert 0 == int(target.local.sum())


@pytest.mark.parametrize(
    "runs",
    [
        torch.zeros(1, 6, dtype=torch.int64),
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(1, 7, dtype=torch.int32),
    ],
)
def test_put_many_refuses_what_is_no_table(
    runs: torch.Tensor, pair: list[Window]
) -> None:
    with pytest.raises(weightsync.PlanError):
        pair[0].put_many([torch.ones(8, dtype=torch.uint8)], runs, 1)


def test_a_put_outside_the_window_is_refused(pair: list[Window]) -> None:
    for offset in (-1, 57, 2**62):
        with pytest.raises(weightsync.PlanError, match="leaves the window of rank 1"):
            pair[0].put(torch.ones(8, dtype=torch.uint8), 1, offset=offset)
    with pytest.raises(weightsync.PlanError, match="no rank 2"):
        pair[0].put(torch.ones(8, dtype=torch.uint8), 2)


@both_backends
def test_operations_are_awaited_on_any_event_loop(
    backend: str, pair: list[Window]
) -> None:
    source, target = pair

    async def main() -> list[int]:
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                await anyio.sleep(0.02)
                await source.put(torch.tensor([5], dtype=torch.uint8), 1)
                await source.signal(1)

            tasks.start_soon(send)
            await target.wait_signals({0: 2})
        return target.local[:2].tolist()

    assert [5, 0] == anyio.run(main, backend=backend)


@both_backends
def test_an_awaited_wait_times_out_and_takes_nothing(
    backend: str, pair: list[Window]
) -> None:
    source, target = pair
    source.signal(1).wait()

    async def main() -> None:
        started = anyio.current_time()
        with pytest.raises(weightsync.TimedOutError, match="1 of 2 from rank 0"):
            await target.wait_signals({0: 2}, timeout=0.1)
        assert 0.1 <= anyio.current_time() - started < 1
        await target.wait_signal(0, timeout=5)

    anyio.run(main, backend=backend)


@both_backends
def test_a_cancelled_wait_takes_no_signal(backend: str, pair: list[Window]) -> None:
    source, target = pair

    async def main() -> None:
        with anyio.move_on_after(0.05) as scope:
            await target.wait_signal(0)
        assert scope.cancelled_caught
        await source.signal(1)
        await target.wait_signal(0, timeout=5)

    anyio.run(main, backend=backend)


@both_backends
def test_a_cancelled_put_reads_its_source_no_more(backend: str) -> None:
    groups = ranks.form(2)
    nbytes = 256 << 20
    source, target = windows(groups, nbytes)
    data = torch.ones(nbytes, dtype=torch.uint8)

    async def main() -> None:
        with anyio.move_on_after(0.005) as scope:
            await source.put(data, 1)
        if scope.cancelled_caught:
            data.fill_(2)
            with pytest.raises(weightsync.TimedOutError):
                await target.wait_signal(0, timeout=0.1)
        assert not bool((target.local == 2).any())

    anyio.run(main, backend=backend)
    ranks.end(groups)


def test_an_operation_that_is_given_up_says_so(pair: list[Window]) -> None:
    waiting = pair[1].wait_signal(0)

    assert not waiting.done()
    waiting.abort()

    assert waiting.done()
    with pytest.raises(weightsync.ClosedError, match="given up"):
        waiting.wait()
    pair[0].signal(1).wait()
    pair[1].wait_signal(0, timeout=5).wait()


def test_a_window_needs_a_group_that_has_windows() -> None:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    with pytest.raises(weightsync.UnsupportedError, match="gloo"):
        Window(gloo, torch.zeros(8, dtype=torch.uint8))


def test_a_window_is_flat_bytes_in_memory_of_its_own() -> None:
    (group,) = ranks.form(1)
    for wrong in (torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8)):
        with pytest.raises(weightsync.PlanError, match="one-dimensional uint8"):
            Window(group, wrong)
    with pytest.raises(weightsync.UnsupportedError):
        Window(group, torch.zeros(8, dtype=torch.uint8))
    for nbytes in (0, -1):
        with pytest.raises(weightsync.PlanError):
            Window.allocate(group, nbytes)
    with pytest.raises(weightsync.WeightSyncError, match="available"):
        Window.allocate(group, 1 << 45)
    group.shutdown()


def test_awaiting_does_not_block_the_loop() -> None:
    groups = ranks.form(2)
    nbytes = 256 << 20
    source, target = windows(groups, nbytes)
    data = torch.ones(nbytes, dtype=torch.uint8)
    gaps: list[float] = []

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gaps[-1] = max(gaps[-1], now - last)
            last = now

    async def take() -> None:
        await target.wait_signal(0)

    async def main() -> None:
        heart = asyncio.create_task(beat())
        for _ in range(3):
            gaps.append(0.0)
            waiting = asyncio.create_task(take())
            await source.put(data, 1)
            await waiting
        heart.cancel()

    asyncio.run(main())
    ranks.end(groups)

    # The machine itself may stop a process once; it does not do so each time.
    assert min(gaps) < 0.05
