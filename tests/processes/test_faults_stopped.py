"""A process is stopped, or never comes: timeouts are real and name who is missing."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import MIB, Held, ask, call

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes

GRACE = 3.0


def _pool(processes: Processes, address: str) -> tuple[Child, list[Child]]:
    trainer = processes.start(driven.trainer, address, 0, 1, MIB)
    generators = [
        processes.start(driven.generator, address, f"gen-{i}", 0, 1, MIB)
        for i in range(2)
    ]
    for child in (trainer, *generators):
        assert child.hear() == "open"
    assert call(trainer, "wait_for_replicas", count=2).kind == "ok"
    time.sleep(0.2)  # until both have opened a slot, which nobody can see
    return trainer, generators


def test_a_stopped_generator_fails_alone_within_the_timeout(
    processes: Processes, address: str
) -> None:
    trainer, (healthy, stopped) = _pool(processes, address)
    stopped.kill(signal.SIGSTOP)
    ask(healthy, "receive", timeout=5)
    pushed = call(trainer, "push", version=1, timeout=2)

    assert "ok" == pushed.kind
    assert 2 <= pushed.seconds < 2 + GRACE
    assert ("gen-0",) == pushed.value.delivered
    assert "timed out" in pushed.value.failed["gen-1"]
    assert 1 == healthy.hear().value.version

    waited = call(healthy, "receive", timeout=0.5)

    assert "TimedOutError" == waited.kind
    assert 0.5 <= waited.seconds < 1.0

    ask(healthy, "receive", timeout=5)
    pushed = call(trainer, "push", version=2, timeout=2)

    assert ("gen-0",) == pushed.value.delivered
    assert pushed.seconds < 1.0
    assert 2 == healthy.hear().value.version

    stopped.kill(signal.SIGCONT)
    told = call(stopped, "receive", timeout=5)

    if told.kind == "ok":  # version 1 was whole there before the trainers gave it up
        assert 1 == told.value.version
        assert Held(1, 1) == call(stopped, "held").value
        told = call(stopped, "receive", timeout=5)
    assert "PeerError" == told.kind
    assert "removed from the pool" in told.value
    assert driven.close(trainer, healthy, stopped) < 5.0


def test_a_generator_that_is_stopped_shortly_gets_the_version(
    processes: Processes, address: str
) -> None:
    trainer, (first, second) = _pool(processes, address)
    second.kill(signal.SIGSTOP)
    ask(trainer, "push", version=1, timeout=10)
    ask(first, "receive", timeout=5)

    assert 1 == first.hear().value.version

    second.kill(signal.SIGCONT)

    assert 1 == call(second, "receive", timeout=5).value.version
    assert {"gen-0", "gen-1"} == set(trainer.hear().value.delivered)
    assert driven.close(trainer, first, second) < 5.0


def test_a_stopped_trainer_rank_times_the_push_out_and_the_next_one_works(
    processes: Processes, address: str
) -> None:
    trainers = [processes.start(driven.trainer, address, i, 2, MIB) for i in range(2)]
    generator = processes.start(driven.generator, address, "gen", 0, 1, MIB)
    for child in (*trainers, generator):
        assert child.hear() == "open"
    for trainer in trainers:
        assert call(trainer, "wait_for_replicas", count=1).kind == "ok"
    trainers[1].kill(signal.SIGSTOP)
    pushed = call(trainers[0], "push", version=1, timeout=1)

    assert "TimedOutError" == pushed.kind
    assert "trainer rank 1" in pushed.value
    assert 1 <= pushed.seconds < 1 + GRACE

    trainers[1].kill(signal.SIGCONT)
    for version in (1, 2):  # its answer to version 1 is the outcome that rank 0 had
        ask(trainers[1], "push", version=version, timeout=5)
        if version == 2:
            ask(trainers[0], "push", version=version, timeout=5)
        late = trainers[1].hear()

        assert ("TimedOutError" if version == 1 else "ok") == late.kind

    assert ("gen",) == trainers[0].hear().value.delivered
    assert 2 == call(generator, "receive", timeout=5).value.version
    assert driven.close(*trainers, generator) < 5.0


def test_a_trainer_rank_that_stops_in_the_middle_fails_the_push_everywhere(
    processes: Processes, address: str
) -> None:
    numel = 128 * MIB
    trainers = [processes.start(driven.trainer, address, i, 2, numel) for i in range(2)]
    modes = ("inplace", "staged")
    watch, other = (
        processes.start(driven.generator, address, mode, 0, 1, numel, mode)
        for mode in modes
    )
    for child in (*trainers, watch, other):
        assert child.hear() == "open"
    for trainer in trainers:
        assert call(trainer, "wait_for_replicas", count=2).kind == "ok"
    pid = trainers[1].pid
    call(watch, "kill_at_first_byte", pid=pid, number=signal.SIGSTOP)
    ask(watch, "receive", timeout=10)
    for trainer in trainers:
        ask(trainer, "push", version=1, timeout=1)
    pushed = trainers[0].hear()

    assert pushed.seconds < 1 + GRACE
    told = watch.hear()

    assert told.kind in {"PeerError", "ok"}
    held = call(other, "held").value

    assert (None, driven.SENTINEL) == held  # whole, but not switched in, or not there
    trainers[1].kill(signal.SIGCONT)
    late = trainers[1].hear()

    assert pushed.kind == late.kind
    assert str(pushed.value) == str(late.value)
    assert driven.close(*trainers, watch, other) < 5.0


def test_a_stopped_leader_times_the_other_rank_out(
    processes: Processes, address: str
) -> None:
    trainers = [processes.start(driven.trainer, address, i, 2, MIB) for i in range(2)]
    for child in trainers:
        assert child.hear() == "open"
    trainers[0].kill(signal.SIGSTOP)
    pushed = call(trainers[1], "push", version=1, timeout=1)

    assert "TimedOutError" == pushed.kind
    assert "trainer rank 0" in pushed.value
    assert 1 <= pushed.seconds < 1 + GRACE
    assert driven.close(trainers[1]) < 5.0

    trainers[0].kill(signal.SIGCONT)

    assert driven.close(trainers[0]) < 5.0


def test_a_receive_in_place_ends_in_time_beside_a_stopped_leader(
    processes: Processes, address: str
) -> None:
    trainer = processes.start(driven.trainer, address, 0, 1, MIB)
    generator = processes.start(driven.generator, address, "gen", 0, 1, MIB, "inplace")
    for child in (trainer, generator):
        assert child.hear() == "open"
    assert call(trainer, "wait_for_replicas", count=1).kind == "ok"
    ask(generator, "receive", timeout=20)
    assert call(trainer, "push", version=1, timeout=20).kind == "ok"
    assert generator.hear().kind == "ok"
    ask(generator, "receive", timeout=0.5)
    time.sleep(0.2)  # until it has opened its slot, which nobody can see
    trainer.kill(signal.SIGSTOP)
    for seconds in (0.5, 0.1):
        outcome = generator.hear()

        assert "TimedOutError" == outcome.kind
        assert outcome.seconds < seconds + GRACE

        ask(generator, "receive", timeout=0.1 if seconds == 0.5 else 20)
    trainer.kill(signal.SIGCONT)

    assert "ok" == call(trainer, "push", version=2, timeout=20).kind
    assert 2 == generator.hear().value.version
    assert Held(2, 2) == call(generator, "held").value
    assert driven.close(trainer, generator) < 5.0


def test_a_close_beside_stopped_peers_ends_soon(
    processes: Processes, address: str
) -> None:
    trainer, generators = _pool(processes, address)
    for generator in generators:
        generator.kill(signal.SIGSTOP)

    assert driven.close(trainer) < 5.0

    for generator in generators:
        generator.kill(signal.SIGCONT)

    assert driven.close(*generators) < 5.0


async def _times_out(
    transport: weightsync.Trainer | weightsync.Generator, missing: str
) -> None:
    started = anyio.current_time()
    with pytest.raises(weightsync.TimedOutError, match=missing):
        async with transport:
            if isinstance(transport, weightsync.Trainer):
                await transport.wait_for_replicas(2)
            else:
                await transport.receive(timeout=3)

    assert 0.9 <= anyio.current_time() - started < 1 + GRACE


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_start_without_the_others_times_out_and_says_who_is_missing(
    backend: str, address: str
) -> None:
    def generator(replica: str, rank: int, size: int) -> weightsync.Generator:
        weights = {"w": torch.zeros(4)}
        return weightsync.Generator(
            address, weights, replica=replica, rank=rank, world_size=size, timeout=1
        )

    def trainer(rank: int, size: int) -> weightsync.Trainer:
        return weightsync.Trainer(address, rank=rank, world_size=size, timeout=1)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_times_out, trainer(1, 2), "trainer rank 0")
            tasks.start_soon(_times_out, generator("solo", 0, 1), "trainer rank 0")
        await _times_out(trainer(0, 1), "0 joined")
        async with trainer(0, 1), anyio.create_task_group() as tasks:
            tasks.start_soon(_times_out, generator("a", 0, 2), r"ranks \[1\] did not")
            tasks.start_soon(_times_out, generator("b", 1, 2), "rank 0 of replica 'b'")

    anyio.run(main, backend=backend)
