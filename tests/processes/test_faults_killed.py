"""A process is killed between pushes or during one: the others end, and know whom."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes

TIMEOUT = 5.0
BOUND = TIMEOUT + 3.0


class Pool:
    """Two trainer ranks, a replica of one rank and one of two, and one that watches."""

    def __init__(
        self, processes: Processes, address: str, numel: int, engine: Engine
    ) -> None:
        device = engine.device
        self.name = engine.name

        def generator(replica: str, rank: int, size: int, mode: str) -> Child:
            arguments = (address, replica, rank, size, numel, mode, 10.0, device)
            name = f"{replica}-{rank}"
            return processes.start(driven.generator, *arguments, name=name)

        self.trainers = [
            processes.start(
                driven.trainer, address, rank, 2, numel, 10.0, device, name=f"T{rank}"
            )
            for rank in range(2)
        ]
        self.solo = generator("solo", 0, 1, "staged")
        self.pair = [generator("pair", rank, 2, "staged") for rank in range(2)]
        # On a GPU it looks into its window, in any mode.
        self.watch = generator(
            "watch", 0, 1, "inplace" if engine.name == "shm" else "staged"
        )
        self.generators = [self.solo, *self.pair, self.watch]
        for child in (*self.trainers, *self.generators):
            assert child.hear() == "open"
        for trainer in self.trainers:
            assert call(trainer, "wait_for_replicas", count=3).kind == "ok"

    def child(self, name: str) -> Child:
        everyone = (*self.trainers, *self.generators)
        return next(child for child in everyone if child.name == name)

    def survivors(self, victim: str, children: list[Child]) -> list[Child]:
        return [child for child in children if child.name != victim]

    def push(self, victim: str, version: int) -> Iterator[driven.Outcome]:
        trainers = self.survivors(victim, self.trainers)
        for trainer in trainers:
            ask(trainer, "push", version=version, timeout=TIMEOUT)
        return (trainer.hear() for trainer in trainers)


def _size(engine: Engine, during: bool) -> int:
    """So much that a push lasts until somebody is killed in it."""
    if not during:
        return MIB
    return 128 * MIB if engine.name == "shm" else 48 * MIB


def _same(outcomes: list[driven.Outcome]) -> bool:
    return len({(outcome.kind, str(outcome.value)) for outcome in outcomes}) == 1


def _strike(pool: Pool, victim: str, *, during: bool) -> list[driven.Outcome]:
    """Kill, push version 1, and return how the push ended on the surviving ranks."""
    pid = pool.child(victim).pid
    for generator in pool.generators:
        if generator is pool.watch and during:
            call(generator, "kill_at_first_byte", pid=pid, number=signal.SIGKILL)
        ask(generator, "receive", timeout=TIMEOUT)
    if during:
        for trainer in pool.trainers:
            ask(trainer, "push", version=1, timeout=TIMEOUT)
        alive = pool.survivors(victim, pool.trainers)
        return [trainer.hear() for trainer in alive]
    pool.child(victim).kill()
    return list(pool.push(victim, 1))


def _check_memory(pool: Pool, victim: str) -> None:
    """Every surviving generator has the whole old or the whole new version."""
    for generator in pool.survivors(victim, pool.generators):
        if generator is pool.watch and pool.name == "shm":
            continue  # in place a version that was given up leaves none: documented
        held = call(generator, "held").value

        assert held in {Held(None, SENTINEL), Held(1, 1)}, generator.name


@pytest.mark.parametrize("during", [False, True], ids=["between", "during"])
@pytest.mark.parametrize("victim", ["solo-0", "pair-0", "pair-1"])
def test_a_killed_generator_rank_fails_its_replica_only(
    victim: str, during: bool, engine: Engine, processes: Processes, address: str
) -> None:
    before = driven.in_shared_memory()
    pool = Pool(processes, address, _size(engine, during), engine)
    outcomes = _strike(pool, victim, during=during)
    replica = victim.partition("-")[0]
    for outcome in outcomes:
        failed = {} if outcome.kind != "ok" else outcome.value.failed

        assert "ok" == outcome.kind
        assert outcome.seconds < BOUND
        # Between pushes the pool may have lost it before the push began.
        assert set(failed) <= {replica}
        assert all(failed.values())
        # Who dies after its version was whole counts as delivered.
        assert {"solo", "pair", "watch"} - {replica} <= set(outcome.value.delivered)
        assert {"solo", "pair", "watch"} >= set(outcome.value.delivered) | set(failed)

    assert _same(outcomes)
    for generator in pool.survivors(victim, pool.generators):
        outcome = generator.hear()
        if generator in pool.pair and replica == "pair":
            if outcome.kind == "ok":  # whole before the other rank died
                outcome = call(generator, "receive", timeout=TIMEOUT)
            rank = victim.partition("-")[2]

            assert "PeerError" == outcome.kind
            assert f"rank {rank} of replica 'pair'" in outcome.value
        else:
            assert ("ok", 1) == (outcome.kind, outcome.value.version)
    _check_memory(pool, victim)
    for version in (2, 3):
        healthy = [g for g in pool.generators if not g.name.startswith(replica)]
        for generator in healthy:
            ask(generator, "receive", timeout=TIMEOUT)

        assert ["ok", "ok"] == [outcome.kind for outcome in pool.push("", version)]
        assert ["ok"] * len(healthy) == [child.hear().kind for child in healthy]

    alive = pool.survivors(victim, [*pool.trainers, *pool.generators])

    assert driven.close(*alive) < 5.0
    assert before == driven.in_shared_memory()


@pytest.mark.parametrize("during", [False, True], ids=["between", "during"])
@pytest.mark.parametrize("victim", ["T0", "T1"])
def test_a_killed_trainer_rank_ends_the_job_and_is_named_everywhere(
    victim: str, during: bool, engine: Engine, processes: Processes, address: str
) -> None:
    before = driven.in_shared_memory()
    pool = Pool(processes, address, _size(engine, during), engine)
    (outcome,) = _strike(pool, victim, during=during)
    if during and outcome.kind == "ok":
        # It was killed when all of its own was put: the next push tells.
        (outcome,) = pool.push(victim, 2)
    name = f"trainer rank {victim[1]}"

    assert "PeerError" == outcome.kind
    assert name in outcome.value
    assert outcome.seconds < BOUND
    for generator in pool.generators:
        received = generator.hear(BOUND)
        if received.kind == "ok":
            assert 1 == received.value.version
            received = call(generator, "receive", timeout=TIMEOUT)
        assert "PeerError" == received.kind
        assert name in received.value, (generator.name, received.value)
        assert received.seconds < BOUND
    _check_memory(pool, victim)
    alive = pool.survivors(victim, [*pool.trainers, *pool.generators])

    assert driven.close(*alive) < 5.0
    assert before == driven.in_shared_memory()


class _Gate(tuple[str, ...]):
    """Patterns; whoever asks for them waits, as for the capture of large tensors."""

    __slots__ = ()
    reached = threading.Event()
    opened = threading.Event()

    def __iter__(self) -> Any:
        self.reached.set()
        assert self.opened.wait(20)
        return super().__iter__()


def test_a_push_that_is_being_prepared_when_the_leader_dies_ends_at_once(
    processes: Processes, address: str
) -> None:
    leader = processes.start(driven.trainer, address, 0, 2, 8)
    outcome: list[object] = []

    def push() -> None:
        try:
            transport.push({"w": torch.zeros(4)}, ignore=_Gate(["other"]), timeout=10)
        except weightsync.WeightSyncError as error:
            outcome.append(error)

    with weightsync.blocking.Trainer(address, rank=1, world_size=2) as transport:
        assert leader.hear() == "open"
        pushing = threading.Thread(target=push)
        pushing.start()
        assert _Gate.reached.wait(20)
        leader.kill()
        with pytest.raises(weightsync.PeerError):
            transport.wait_for_replicas(1)
        started = time.monotonic()
        _Gate.opened.set()
        pushing.join(20)

    assert [weightsync.PeerError] == [type(error) for error in outcome]
    assert "trainer rank 1 lost the leader" in str(outcome[0])
    assert time.monotonic() - started < 5


def test_in_place_a_version_that_came_without_a_word_leaves_none(
    processes: Processes, address: str
) -> None:
    """Rank 0 of the replica dies with the word of a version that is being put."""
    trainer = processes.start(driven.trainer, address, 0, 1, MIB)
    pair = [
        processes.start(driven.generator, address, "pair", rank, 2, MIB, "inplace")
        for rank in range(2)
    ]
    for child in (trainer, *pair):
        assert child.hear() == "open"
    assert call(trainer, "wait_for_replicas", count=1).kind == "ok"
    for generator in pair:
        ask(generator, "receive", timeout=20)
    assert call(trainer, "push", version=1, timeout=20).kind == "ok"
    assert [1, 1] == [generator.hear().value.version for generator in pair]
    for generator in pair:
        ask(generator, "receive", timeout=20)
    time.sleep(0.2)  # until they have opened their slots, which nobody can see
    pair[0].kill(signal.SIGSTOP)
    pushed = call(trainer, "push", version=2, timeout=1)
    pair[0].kill()
    received = pair[1].hear()
    held = call(pair[1], "held").value

    assert "TimedOutError" == pushed.kind
    assert "PeerError" == received.kind
    assert Held(None, 2) == held
    assert driven.close(trainer, pair[1]) < 5.0
