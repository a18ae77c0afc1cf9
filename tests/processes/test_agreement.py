"""Both sides plan, and compare what they planned before the first byte of a layout."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest
import torch
from anyio.abc import SocketAttribute

import weightsync
import weightsync.link
import weightsync.plan
from tests.processes.driven import timed
from tests.processes.rig import SECONDS, Job, open_job, together, until_pending
from weightsync.channel import Endpoint
from weightsync.store import Rendezvous, open_store, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import SocketStream, TaskGroup

    from tests.processes.harness import Child, Control, Processes

pytestmark = pytest.mark.anyio

NUMEL: Final = 1 << 16
SENTINEL: Final = -777.0
SLOW_SECONDS: Final = 1.5


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def full(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUMEL,), float(value))}


# Planners that are not like those of the others


def _other_sender() -> None:
    """Expect everything from another trainer rank that holds it too."""
    sender = weightsync.plan.sender
    weightsync.plan.sender = lambda group, box, copy: sender(group, box, copy + 1)


def _no_plan() -> None:
    def make_plan(*_: object, **__: object) -> Any:
        raise MemoryError("no room for a plan")

    weightsync.link.make_plan = make_plan


def _slow() -> None:
    original = weightsync.link.make_plan

    def make_plan(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return original(*args, **options)

    weightsync.link.make_plan = make_plan


async def _odd_one(
    control: Control, address: str, patch: Callable[[], None], mode: Any
) -> tuple[list[tuple[str, str]], set[float]]:
    """A generator with another planner; how its receives end, and what it holds."""
    patch()
    weights = full(SENTINEL)
    async with weightsync.Generator(
        address, weights, replica="odd", mode=mode, timeout=SECONDS
    ) as transport:
        control.say("open")
        ends = []
        for _ in range(await control.ahear()):
            outcome = await timed(transport.receive(timeout=SECONDS))
            ends.append((outcome.kind, str(outcome.value)))
        control.say("received")
        await control.ahear()
    return ends, set(weights["w"].tolist())


async def _hear(child: Child) -> Any:
    return await anyio.to_thread.run_sync(child.hear)


async def _join_odd(
    job: Job, processes: Processes, patch: Callable[[], None], mode: str
) -> Child:
    """Let the odd one join, and receive once."""
    odd = processes.start(_odd_one, job.address, patch, mode)
    assert "open" == await _hear(odd)
    odd.say(1)
    for trainer in job.trainers:
        while "odd" not in trainer.replicas:
            await anyio.sleep(0.01)
    return odd


@pytest.mark.parametrize("mode", ["staged", "inplace"])
@pytest.mark.parametrize(
    ("patch", "kind", "words"),
    [
        (_other_sender, weightsync.ProtocolError, "its plan differs"),
        (_no_plan, weightsync.PeerError, "MemoryError: no room for a plan"),
    ],
)
async def test_a_replica_that_plans_otherwise_is_an_error_and_gets_no_byte(
    processes: Processes,
    patch: Callable[[], None],
    kind: type[Exception],
    words: str,
    mode: str,
) -> None:
    async with open_job(2) as job:
        odd = await _join_odd(job, processes, patch, mode)
        started = anyio.current_time()
        outcomes = await job.outcomes(full(1))
        seconds = anyio.current_time() - started
        assert "received" == await _hear(odd)
        replicas = [trainer.replicas for trainer in job.trainers]
        odd.say(None)
        ((end, told),), held = await anyio.to_thread.run_sync(odd.result)

    assert [kind] * 2 == [type(outcome) for outcome in outcomes]
    assert all("'odd'" in str(error) and words in str(error) for error in outcomes)
    assert seconds < 5
    assert [(), ()] == replicas
    assert ("PeerError", True) == (end, words in told)
    assert {SENTINEL} == held


async def test_a_replica_that_plans_otherwise_concerns_no_other(
    processes: Processes,
) -> None:
    weights = full(SENTINEL)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        odd = await _join_odd(job, processes, _other_sender, "staged")
        reports = await job.push(full(1))
        await generator.receive(timeout=SECONDS)
        odd.say(None)
        await job.deliver(generator, full(2))

    assert [("gen-0",)] * 2 == [report.delivered for report in reports]
    assert [True] * 2 == [report.replicas["odd"].removed for report in reports]
    assert {2.0} == set(weights["w"].tolist())


async def test_a_slow_planner_delays_only_its_own_replica(
    processes: Processes,
) -> None:
    weights = full(SENTINEL)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        odd = await _join_odd(job, processes, _slow, "staged")
        reports: list[Any] = []

        async def push() -> None:
            reports.extend(await job.push(full(1)))

        async with anyio.create_task_group() as group:
            group.start_soon(push)
            await until_pending(generator, 1)
            early = not reports
        assert "received" == await _hear(odd)
        odd.say(None)
        ends, held = await anyio.to_thread.run_sync(odd.result)

    assert early
    assert [("gen-0", "odd")] * 2 == [report.delivered for report in reports]
    assert (["ok"], {1.0}) == ([kind for kind, _ in ends], held)


async def test_no_push_waits_for_a_slow_planner_that_joins(
    processes: Processes,
) -> None:
    weights = full(SENTINEL)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        await job.deliver(generator, full(1))
        odd = await _join_odd(job, processes, _slow, "staged")
        reports = await job.push(full(2))
        assert "received" == await _hear(odd)
        odd.say(None)
        ends, held = await anyio.to_thread.run_sync(odd.result)

    assert [("gen-0", "odd")] * 2 == [report.delivered for report in reports]
    assert all(report.seconds < SLOW_SECONDS / 2 for report in reports)
    assert (["ok"], {2.0}) == ([kind for kind, _ in ends], held)


async def test_a_replica_that_does_not_plan_in_time_is_named_and_removed(
    processes: Processes,
) -> None:
    weights = full(SENTINEL)
    async with open_job(2) as job:
        generator = await job.join_one(weights)
        odd = await _join_odd(job, processes, _slow, "staged")
        reports = await job.push(full(1), timeout=0.5)
        await generator.receive(timeout=SECONDS)
        await job.deliver(generator, full(2))
        assert "received" == await _hear(odd)
        odd.say(None)
        ((end, told),), held = await anyio.to_thread.run_sync(odd.result)

    assert [("gen-0",)] * 2 == [report.delivered for report in reports]
    assert all("no plan from the replica" in r.failed["odd"] for r in reports)
    assert ("PeerError", True) == (end, "no plan from the replica" in told)
    assert {SENTINEL} == held


async def test_layouts_that_come_again_after_many_others_are_whole() -> None:
    names = [f"w{index}" for index in range(20)]
    weights = {name: torch.full((3,), SENTINEL) for name in names}
    async with open_job(2) as job:
        generators = [await job.join_one(weights), await job.join_one(dict(weights))]
        for value, name in enumerate([*names, *names[:3], *names[::-1]]):
            source = {name: torch.full((3,), float(value))}
            await job.push(source, partial=True)
            for generator in generators:
                await generator.receive(timeout=SECONDS)

    last = len(names) + 3 + len(names) - 1
    expected = {name: {float(last - index)} for index, name in enumerate(names)}
    assert expected == {name: set(w.tolist()) for name, w in weights.items()}


# What is sent


class _Relay:
    """Stands between the leader and who looks for it, and counts the bytes."""

    def __init__(self, leader: Endpoint) -> None:
        self.nbytes = 0
        self._leader = leader

    async def serve(self, listener: Any) -> None:
        """Pass everything on until cancelled."""
        async with listener:
            await listener.serve(self._attend)

    async def _attend(self, near: SocketStream) -> None:
        far = await anyio.connect_tcp(self._leader.host, self._leader.port)
        async with near, far, anyio.create_task_group() as both:
            both.start_soon(self._pass_on, near, far)
            both.start_soon(self._pass_on, far, near)

    async def _pass_on(self, source: SocketStream, target: SocketStream) -> None:
        try:
            async for data in source:
                self.nbytes += len(data)
                await target.send(data)
            await target.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def _put_between(group: TaskGroup, address: str) -> _Relay:
    """Let those who come from now on reach the leader through a relay."""
    store = open_store(parse_address(address), host=False, timeout=SECONDS)
    rendezvous = Rendezvous(store, "weightsync/default")
    leader = rendezvous.lookup("leader", Endpoint, timeout=SECONDS)
    relay = _Relay(leader)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    group.start_soon(relay.serve, listener)
    port = listener.extra(SocketAttribute.local_port)
    rendezvous.publish("leader", Endpoint("127.0.0.1", port, leader.token))
    return relay


async def test_only_the_first_push_of_a_layout_sends_manifests() -> None:
    source = {f"model.layers.{i}.weight": torch.ones(2, 2) for i in range(2000)}
    weights = {name: torch.zeros(2, 2) for name in source}
    counts = []
    async with anyio.create_task_group() as group, AsyncExitStack() as stack:
        options: dict[str, Any] = {"world_size": 2, "timeout": SECONDS}
        trainers = [
            await stack.enter_async_context(
                weightsync.Trainer("tcp://127.0.0.1:0", rank=0, **options)
            )
        ]
        address = trainers[0].address
        relay = await _put_between(group, address)
        other = weightsync.Trainer(address, rank=1, **options)
        trainers.append(await stack.enter_async_context(other))
        generator = await stack.enter_async_context(
            weightsync.Generator(address, weights, replica="g", timeout=SECONDS)
        )
        for trainer in trainers:
            await trainer.wait_for_replicas(1)
        for _ in range(20):
            before = relay.nbytes
            pushes = [
                lambda trainer=trainer: trainer.push(source) for trainer in trainers
            ]
            await together(*pushes)
            await generator.receive(timeout=SECONDS)
            counts.append(relay.nbytes - before)
        group.cancel_scope.cancel()

    assert counts[0] > 2000 * len("model.layers.0.weight")
    assert max(counts[1:]) < 1000
