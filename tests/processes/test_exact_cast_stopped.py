"""A put that converts is given up, fails or is cancelled between its batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import anyio
import anyio.from_thread
import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.ranks import in_threads
from tests.processes.rig import SECONDS
from weightsync.casting import HALF_BYTES
from weightsync.engine import ShmEngine
from weightsync.epoch import Mode
from weightsync.link import GeneratorLink, Link, TrainerLink
from weightsync.memory import Memory
from weightsync.messages import Expect, FormLink, Layout, Put
from weightsync.plan import slot_layout
from weightsync.remembered import Remembered
from weightsync.slots import Slots
from weightsync.spec import Box, Manifest, TensorSpec
from weightsync.together import Together
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

BATCHES = 5
NUMEL = BATCHES * HALF_BYTES // 2 - 3
EXACT = 1000
DIGEST = bytes(16)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def manifest(dtype: str) -> Manifest:
    specs = {"w": (dtype, (NUMEL,)), "x": ("float32", (EXACT,))}
    return Manifest.of(
        TensorSpec(name, kind, shape, Box.whole(shape))
        for name, (kind, shape) in specs.items()
    )


class Watched(Sequence[Tensor]):
    """Tensors that call something when one is taken the ``turn``-th time."""

    def __init__(
        self, tensors: Sequence[Tensor], turn: int, call: Callable[[], object]
    ) -> None:
        self.taken = 0
        self._tensors = tensors
        self._turn = turn
        self._call = call

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: Any) -> Any:
        self.taken += 1
        if self.taken == self._turn:
            self._call()
        return self._tensors[index]


class Linked(NamedTuple):
    """A trainer rank and two ranks of a replica, each with its end of a link."""

    trainer: TrainerLink
    generators: list[GeneratorLink]
    tensors: list[Tensor]

    def put(self, sequence: int) -> Put:
        """What the leader tells the trainer rank; the version is the sequence."""
        return Put(0, 0, sequence, 0, sequence, DIGEST)

    def left(self) -> list[int]:
        """Signals that have come to each generator rank and were not taken."""
        return [
            generator.window._window.available_signals(0)
            for generator in self.generators
        ]

    async def discard(self, signals: Sequence[int]) -> None:
        """Take the signals of a version that was given up."""
        for generator, count in zip(self.generators, signals, strict=True):
            await generator.window.wait_signals({0: count}, timeout=1)

    async def deliver(self, sequence: int) -> bool:
        """Put a version; whether it arrived exactly on both ranks."""
        for tensor in self.tensors:
            tensor.normal_()
        expect = Expect(sequence, sequence, DIGEST)
        await self.trainer.put(self.put(sequence), self.tensors)
        exact: list[bool] = []
        for generator in self.generators:
            operation, prepared = generator.await_signals(expect)
            await operation
            generator.check_headers(expect, prepared, 0)
            exact += [torch.equal(*pair) for pair in self._pairs(generator)]
        return all(exact) and [0, 0] == self.left()

    def _pairs(self, generator: GeneratorLink) -> Iterator[tuple[Tensor, Tensor]]:
        layout = slot_layout(manifest("bfloat16"))
        start = generator.window.nbytes - layout.nbytes
        wanted = [self.tensors[0].to(torch.bfloat16), self.tensors[1]]
        for tensor, offset in zip(wanted, layout.offsets, strict=True):
            at = start + offset
            yield (
                tensor,
                generator.window.local[at : at + tensor.nbytes].view(tensor.dtype),
            )


@pytest.fixture
def linked() -> Iterator[Linked]:
    pushed, wanted = manifest("float32"), manifest("bfloat16")
    slots = Slots.of(Mode.STAGED, wanted)
    layouts: Remembered[bytes, Layout] = Remembered()
    trainer = TrainerLink(0, layouts, ShmEngine())
    generators = [GeneratorLink(rank, slots, ShmEngine()) for rank in range(2)]
    links: list[Link] = [trainer, *generators]
    handles = tuple(link.handle for link in links)
    together = Together.of([wanted, wanted])
    form = FormLink(0, 7, handles, 1, SECONDS, together)
    calls: list[Callable[[], None]] = [lambda: trainer.join(form)]
    for link in generators:
        memory = Memory([Window.allocate(link.group, slots.nbytes)], slots.segments)
        calls.append(lambda link=link, memory=memory: link.join(form, memory))
        link.learn(Layout(DIGEST, Together.of([pushed])))
    layouts.put(DIGEST, Layout(DIGEST, Together.of([pushed])))
    in_threads(calls)
    yield Linked(trainer, generators, [torch.randn(NUMEL), torch.randn(EXACT)])
    for link in links:
        link.abort()


@pytest.mark.parametrize("turn", [1, 2, 3, BATCHES, BATCHES + 1, 2 * BATCHES])
async def test_a_put_that_is_stopped_tells_exactly_what_each_rank_was_sent(
    linked: Linked, turn: int
) -> None:
    watched = Watched(linked.tensors, turn, linked.trainer.stop)
    sent = await linked.trainer.put(linked.put(1), watched)
    left = linked.left()
    await linked.discard(sent)

    assert list(sent) == left
    assert turn == watched.taken  # nothing was converted after the stop
    # The exact runs, each batch that was put, the last one with the header.
    assert max(turn - 3, 0) <= sum(sent) <= turn + 3
    assert await linked.deliver(2)


async def test_a_put_that_is_stopped_before_it_begins_sends_nothing(
    linked: Linked,
) -> None:
    linked.trainer.stop(1)
    sent = await linked.trainer.put(linked.put(1), linked.tensors)

    assert (0, 0) == sent
    assert [0, 0] == linked.left()
    assert await linked.deliver(2)


async def test_a_stop_of_an_earlier_transfer_stops_nothing(linked: Linked) -> None:
    watched = Watched(linked.tensors, 2, lambda: linked.trainer.stop(1))
    sent = await linked.trainer.put(linked.put(2), watched)

    plan = linked.trainer.plan(DIGEST)
    assert tuple(plan.signals(0, rank) for rank in range(2)) == sent
    assert list(sent) == linked.left()
    assert 2 * BATCHES == watched.taken


async def test_a_put_that_is_stopped_at_any_time_counts_right(linked: Linked) -> None:
    """The stop comes from another thread, as from the loop in a push."""
    counted: list[tuple[int, ...]] = []
    for sequence in range(1, 41):
        timer = threading.Timer(sequence * 0.0007, linked.trainer.stop, (sequence,))
        timer.start()
        sent = await linked.trainer.put(linked.put(sequence), linked.tensors)
        timer.join()
        left = linked.left()
        await linked.discard(sent)
        counted.append(sent)

        assert list(sent) == left
    assert [0, 0] == linked.left()
    assert await linked.deliver(50)


async def test_a_cancelled_put_stops_and_reads_no_tensor_any_more(
    linked: Linked,
) -> None:
    stopped = threading.Event()

    def cancel() -> None:
        anyio.from_thread.run_sync(scope.cancel, token=token)
        stopped.wait(5)  # as a conversion does that takes a while

    token = anyio.lowlevel.current_token()
    watched = Watched(linked.tensors, 3, cancel)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(linked.trainer.put, linked.put(1), watched)
            with anyio.CancelScope(shield=True):
                while watched.taken < 3:
                    await anyio.sleep(0.001)
                await anyio.sleep(0.01)
                stopped.set()

    assert scope.cancelled_caught
    assert 3 == watched.taken


async def test_a_generator_rank_that_is_gone_ends_the_put_with_an_error(
    linked: Linked,
) -> None:
    watched = Watched(linked.tensors, 3, linked.generators[0].abort)
    with pytest.raises(weightsync.PeerError, match="generator rank 0 "):
        await linked.trainer.put(linked.put(1), watched)

    assert watched.taken <= 6


async def test_an_aborted_link_ends_the_put(linked: Linked) -> None:
    watched = Watched(linked.tensors, 3, linked.trainer.abort)
    sent = await linked.trainer.put(linked.put(1), watched)

    assert sum(sent) <= 5
    assert 3 == watched.taken


async def test_a_source_that_loses_its_memory_is_an_error_that_names_it(
    linked: Linked,
) -> None:
    lost = linked.tensors[0]
    watched = Watched(linked.tensors, 3, lambda: lost.untyped_storage().resize_(0))
    with pytest.raises(weightsync.PlanError, match=r"cannot convert 'w' to .*bfloat16"):
        await linked.trainer.put(linked.put(1), watched)

    assert 3 == watched.taken
