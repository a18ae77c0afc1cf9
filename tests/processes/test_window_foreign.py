"""Window over a c10d window that has torch's own methods only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes import ranks
from weightsync import Window

if TYPE_CHECKING:
    from collections.abc import Iterator


class TorchWindow:
    """The methods that torch declares for every window, and no other."""

    def __init__(self, window: Any) -> None:
        for name in (
            "put",
            "signal",
            "wait_signal",
            "get_attr",
            "map_remote_tensor",
            "tensor_register",
            "tensor_deregister",
        ):
            setattr(self, name, getattr(window, name))


class TorchGroup:
    """A process group whose windows are like those of another backend."""

    supports_window = True

    def __init__(self, group: Any) -> None:
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self.allocate_tensor = group.allocate_tensor
        self._group = group

    def new_window(self, tensor: torch.Tensor) -> TorchWindow:
        return TorchWindow(self._group.new_window(tensor))


@pytest.fixture
def pair() -> Iterator[list[Window]]:
    groups = ranks.form(2)

    def create(group: Any) -> Window:
        foreign: Any = TorchGroup(group)
        return Window(foreign, Window.allocate(foreign, 64))

    yield ranks.in_threads([lambda g=g: create(g) for g in groups])
    ranks.end(groups)


def test_put_many_and_a_counted_wait_work_by_single_puts(pair: list[Window]) -> None:
    source, target = pair
    tensors = [torch.arange(8, dtype=torch.uint8), torch.full((2,), 7.0)]
    runs = torch.tensor([[0, 1, 10, 2, 2, 4, 8], [1, 4, 40, 1, 4, 4, 4]])
    source.put_many(tensors, runs, 1).wait(5)
    target.wait_signals({0: 3}, timeout=5).wait(5)

    expected = torch.zeros(64, dtype=torch.uint8)
    expected[10:12], expected[18:20] = tensors[0][1:3], tensors[0][5:7]
    expected[40:44] = torch.tensor([7.0]).view(torch.uint8)
    assert torch.equal(expected, target.local)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_wait_can_be_awaited_and_times_out(pair: list[Window], backend: str) -> None:
    source, target = pair

    async def main() -> None:
        with pytest.raises(weightsync.TimedOutError):
            await target.wait_signal(0, timeout=0.1)
        await source.put(torch.ones(4, dtype=torch.uint8), 1)
        await target.wait_signal(0, timeout=5)

    anyio.run(main, backend=backend)
    assert [1, 1, 1, 1, 0] == target.local[:5].tolist()
