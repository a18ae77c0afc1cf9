"""The flow of versions in each mode, on asyncio and trio, whole and in part."""

from __future__ import annotations

from functools import partial
from itertools import count

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import MODES, Mode, open_job, receive_all, together

pytestmark = pytest.mark.anyio


def whole(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((5,), value) for name in ("a", "b", "c")}


def values(tensors: dict[str, torch.Tensor]) -> list[float]:
    assert all(len(set(tensor.tolist())) == 1 for tensor in tensors.values())
    return [tensor[0].item() for tensor in tensors.values()]


@pytest.mark.parametrize("mode", MODES)
async def test_versions_follow_each_other(mode: Mode) -> None:
    weights = whole(-777.0)
    seen = []
    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)
        for value in (1.0, 2.0, 3.0):
            (update,) = await job.deliver(generator, whole(value))
            with generator.use() as held:
                seen.append((update.version, held.version, values(held.tensors)))

    assert [(v, v, [float(v)] * 3) for v in (1, 2, 3)] == seen


@pytest.mark.parametrize("mode", MODES)
async def test_a_partial_push_leaves_the_rest(mode: Mode) -> None:
    weights = whole(-777.0)
    seen = []
    async with open_job(2) as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, whole(1.0))
        for value, names in ((2.0, "a"), (3.0, "bc"), (4.0, "c"), (5.0, "a")):
            part = {name: whole(value)[name] for name in names}
            await job.deliver(generator, part, partial=True)
            seen.append((generator.version, values(weights)))
        await job.deliver(generator, whole(6.0))
        seen.append((generator.version, values(weights)))

    assert [
        (2, [2.0, 1.0, 1.0]),
        (3, [2.0, 3.0, 3.0]),
        (4, [2.0, 3.0, 4.0]),
        (5, [5.0, 3.0, 4.0]),
        (6, [6.0, 6.0, 6.0]),
    ] == seen


@pytest.mark.parametrize("mode", MODES)
async def test_the_first_push_may_be_partial(mode: Mode) -> None:
    weights = whole(-777.0)
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, {"b": whole(1.0)["b"]}, partial=True)

    assert [-777.0, 1.0, -777.0] == values(weights)


@pytest.mark.parametrize("mode", MODES)
async def test_a_partial_push_does_not_write_what_the_engine_changed(
    mode: Mode,
) -> None:
    weights = whole(-777.0)
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        await job.deliver(generator, whole(1.0))
        weights["a"].fill_(9.0)
        await job.deliver(generator, {"b": whole(2.0)["b"]}, partial=True)

    assert [9.0, 2.0, 1.0] == values(weights)


@pytest.mark.parametrize("mode", MODES)
async def test_receive_times_out_and_may_be_called_again(mode: Mode) -> None:
    weights = whole(-777.0)
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        for _ in range(3):
            started = anyio.current_time()
            with pytest.raises(weightsync.TimedOutError, match=r"within 0.1 s"):
                await generator.receive(timeout=0.1)
            assert 0.1 <= anyio.current_time() - started <= 1.0
            with generator.use() as held:
                assert [-777.0] * 3 == values(held.tensors)
        (update,) = await job.deliver(generator, whole(1.0))

    assert (1, [1.0] * 3) == (update.version, values(weights))


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_receive_leaves_the_old_version(mode: Mode) -> None:
    weights = whole(-777.0)
    async with open_job() as job:
        generator = await job.join_one(weights, mode=mode)
        for _ in range(3):
            with anyio.move_on_after(0.05) as scope:
                await generator.receive()
            assert scope.cancelled_caught
            with generator.use() as held:
                assert (None, [-777.0] * 3) == (held.version, values(held.tensors))
        await job.deliver(generator, whole(1.0))

    assert [1.0] * 3 == values(weights)


async def test_in_place_the_weights_cannot_be_read_while_they_may_change() -> None:
    weights = whole(-777.0)
    async with open_job() as job:
        generator = await job.join_one(weights, mode="inplace")

        async def look() -> None:
            while True:
                try:
                    with generator.use():
                        await anyio.sleep(0.001)
                except weightsync.EpochError as error:
                    refusals.append(str(error))
                    return

        refusals: list[str] = []
        outcome, _ = await together(lambda: generator.receive(timeout=0.5), look)
        await job.deliver(generator, whole(1.0))
        with generator.use() as held:
            after = values(held.tensors)

    assert isinstance(outcome, weightsync.TimedOutError)
    assert "inplace" in refusals[0]
    assert [1.0] * 3 == after


async def test_in_place_a_version_that_comes_late_is_received_later() -> None:
    source = {"w": torch.ones(8 << 20)}
    weight = torch.zeros(8 << 20)
    async with open_job() as job:
        generator = await job.join_one({"w": weight}, mode="inplace")

        async def impatient() -> list[int]:
            while True:
                try:
                    update = await generator.receive(timeout=0.002)
                except weightsync.TimedOutError:
                    continue
                return [update.version]

        for _ in range(5):
            reports, versions = await together(lambda: job.push(source), impatient)
            assert versions == [reports[0].version] == [generator.version]
            assert torch.equal(source["w"], weight)
            source["w"] += 1


async def test_in_place_a_partial_push_does_not_heal_what_was_torn() -> None:
    size = 32 << 20
    weights = {"a": torch.zeros(size), "b": torch.zeros(1)}
    async with open_job() as job:
        generator = await job.join_one(weights, mode="inplace")
        pushed = {"a": torch.ones(size), "b": torch.ones(1)}
        await job.deliver(generator, pushed)

        async def give_up(seconds: float) -> None:
            with anyio.move_on_after(seconds):
                await job.push(pushed)

        for attempt in count():
            # Neither before the first byte nor after the last: try until it is so.
            await together(
                partial(give_up, 0.001 * (1 + attempt % 20)),
                partial(generator.receive, timeout=0.5),
            )
            if generator.version is None:
                break
        with pytest.raises(weightsync.EpochError):
            generator.use().__enter__()
        await job.deliver(generator, {"b": torch.ones(1)}, partial=True)
        assert generator.version is None
        with pytest.raises(weightsync.EpochError):
            generator.use().__enter__()
        (update,) = await job.deliver(generator, {"a": torch.ones(size)}, partial=True)
        with generator.use() as held:
            version = held.version

    assert update.version == version
    assert bool((weights["a"] == 1).all())


@pytest.mark.parametrize("ahead", [0, 1])
async def test_in_place_one_rank_may_give_up_before_the_other_waits(ahead: int) -> None:
    weights = [whole(-777.0), whole(-777.0)]
    async with open_job(2) as job:
        generators = await job.join(*weights, mode="inplace")
        for value in (1.0, 2.0):
            with pytest.raises(weightsync.TimedOutError):
                await generators[ahead].receive(timeout=0.05)
            with generators[ahead].use() as held:
                before = values(held.tensors)
            outcomes = await receive_all(generators, timeout=0.05)
            assert all(isinstance(o, weightsync.TimedOutError) for o in outcomes)
            await job.deliver(generators, whole(value))
            assert [value] * 3 == values(weights[0]) == values(weights[1])
            assert [max(value - 1, 0.0) or -777.0] * 3 == before
