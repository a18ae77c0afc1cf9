"""A process is frozen: its peers drop it when its lease ends, and say so afterwards."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes

LEASE = 2.0
# A push that waits for a frozen process ends with the lease, long before its timeout.
TIMEOUT = 25.0
BOUND = LEASE + 3.0
SILENT = f"gave no sign of life for {LEASE:g} s"


class Job:
    """Trainer ranks, a replica ``well`` that nothing happens to, and another."""

    def __init__(
        self,
        processes: Processes,
        address: str,
        *,
        trainers: int = 1,
        ranks: int = 1,
        numel: int = MIB,
        mode: str = "staged",
    ) -> None:
        self.trainers = [
            processes.start(driven.trainer, address, rank, trainers, numel, LEASE)
            for rank in range(trainers)
        ]
        self.well = processes.start(
            driven.generator, address, "well", 0, 1, numel, "staged", LEASE
        )
        self.frail = [
            processes.start(
                driven.generator, address, "frail", rank, ranks, numel, mode, LEASE
            )
            for rank in range(ranks)
        ]
        for child in (*self.trainers, self.well, *self.frail):
            assert child.hear() == "open"
        for trainer in self.trainers:
            assert call(trainer, "wait_for_replicas", count=2).kind == "ok"

    def push(self, version: int, **options: float) -> driven.Outcome:
        """Push on all trainer ranks; return their one outcome."""
        self.start_push(version, **options)
        return self.pushed()

    def start_push(self, version: int, **options: float) -> None:
        for trainer in self.trainers:
            ask(trainer, "push", version=version, **{"timeout": TIMEOUT, **options})

    def pushed(self) -> driven.Outcome:
        outcomes = [trainer.hear(TIMEOUT + 5) for trainer in self.trainers]

        assert 1 == len({(each.kind, str(each.value)) for each in outcomes})
        return outcomes[0]

    def receive_on(self, generator: Child, version: int) -> None:
        """Receive a version; every byte of it is checked."""
        received = call(generator, "receive", timeout=10)

        assert ("ok", version) == (received.kind, received.value.version)
        assert Held(version, version) == call(generator, "held").value

    def await_removal(self) -> float:
        """Wait until the pool has one replica less; return the seconds."""
        started = time.monotonic()
        while call(self.trainers[0], "replicas").value != ("well",):
            assert time.monotonic() - started < BOUND
            time.sleep(0.02)
        return time.monotonic() - started

    def check_goes_on(self, *versions: int) -> None:
        """The rest of the job is undisturbed."""
        for version in versions:
            pushed = self.push(version)

            assert ("well",) == pushed.value.delivered
            assert {} == pushed.value.failed
            assert pushed.seconds < 2.0
            self.receive_on(self.well, version)


def _told(generator: Child) -> driven.Outcome:
    """What a receive raises, after versions that were whole."""
    told = call(generator, "receive", timeout=5)
    return call(generator, "receive", timeout=5) if told.kind == "ok" else told


def test_a_replica_that_freezes_between_pushes_is_out_of_the_next_one(
    processes: Processes, address: str
) -> None:
    job = Job(processes, address)
    job.push(1)
    for generator in (job.well, *job.frail):
        job.receive_on(generator, 1)
    job.frail[0].kill(signal.SIGSTOP)
    seconds = job.await_removal()
    job.check_goes_on(2, 3)
    job.frail[0].kill(signal.SIGCONT)
    told = _told(job.frail[0])

    assert LEASE / 2 < seconds < LEASE + 1.5
    assert "PeerError" == told.kind
    assert "replica 'frail' lost the trainers" in told.value
    assert "the leader (trainer rank 0) removed this process" in told.value
    assert SILENT in told.value
    assert told.seconds < 1.0
    assert Held(1, 1) == call(job.frail[0], "held").value
    assert driven.close(*job.trainers, job.well, *job.frail) < 5.0


@pytest.mark.parametrize("timeout", [TIMEOUT, 1.0], ids=["lease", "timeout"])
def test_a_push_to_a_frozen_replica_ends_with_its_lease_or_its_own_timeout(
    timeout: float, processes: Processes, address: str
) -> None:
    job = Job(processes, address)
    job.frail[0].kill(signal.SIGSTOP)
    job.start_push(1, timeout=timeout)
    job.receive_on(job.well, 1)
    pushed = job.pushed()
    reason = pushed.value.failed["frail"]
    job.check_goes_on(2)
    job.frail[0].kill(signal.SIGCONT)
    told = _told(job.frail[0])

    assert ("well",) == pushed.value.delivered
    assert pushed.value.replicas["frail"].removed
    assert (f"replica 'frail' {SILENT}" if timeout > LEASE else "timed out") in reason
    assert pushed.seconds < min(timeout, LEASE) + 1.5
    assert "PeerError" == told.kind
    assert "removed" in told.value
    assert driven.close(*job.trainers, job.well, *job.frail) < 5.0


def test_a_replica_that_freezes_in_the_middle_of_a_push_fails_alone(
    processes: Processes, address: str
) -> None:
    before = driven.in_shared_memory()
    job = Job(processes, address, numel=256 * MIB, mode="inplace")
    frail = job.frail[0]
    call(frail, "kill_at_first_byte", pid=frail.pid, number=signal.SIGSTOP)
    ask(frail, "receive", timeout=TIMEOUT)
    job.start_push(1)
    job.receive_on(job.well, 1)
    pushed = job.pushed()
    job.check_goes_on(2)
    frail.kill(signal.SIGCONT)
    told = frail.hear()
    if told.kind == "ok":  # all of it had arrived before it froze
        told = call(frail, "receive", timeout=5)

    assert ("well",) == pushed.value.delivered
    assert f"replica 'frail' {SILENT}" == pushed.value.failed["frail"]
    assert LEASE / 2 < pushed.seconds < BOUND
    assert "PeerError" == told.kind
    assert "removed this process" in told.value
    assert driven.close(*job.trainers, job.well, frail) < 5.0
    assert before == driven.in_shared_memory()


@pytest.mark.parametrize("victim", [0, 1])
def test_one_frozen_rank_takes_its_replica_out_and_no_other(
    victim: int, processes: Processes, address: str
) -> None:
    job = Job(processes, address, ranks=2)
    other = job.frail[1 - victim]
    job.frail[victim].kill(signal.SIGSTOP)
    ask(other, "receive", timeout=TIMEOUT)
    job.start_push(1)
    job.receive_on(job.well, 1)
    pushed = job.pushed()
    heard = other.hear()
    job.check_goes_on(2, 3)
    job.frail[victim].kill(signal.SIGCONT)
    told = _told(job.frail[victim])
    culprit = "replica 'frail'" if victim == 0 else "rank 1 of replica 'frail'"

    assert f"{culprit} {SILENT}" in pushed.value.failed["frail"]
    assert pushed.seconds < BOUND
    assert "PeerError" == heard.kind
    assert f"rank {victim} of replica 'frail' {SILENT}" in heard.value
    assert heard.seconds < BOUND
    assert "PeerError" == told.kind
    assert "removed this process" in told.value
    assert Held(None, SENTINEL) == call(other, "held").value
    assert driven.close(*job.trainers, job.well, *job.frail) < 5.0


@pytest.mark.parametrize("pushing", [False, True], ids=["between", "during"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_trainer_rank_ends_the_job_and_is_named_everywhere(
    victim: int, pushing: bool, processes: Processes, address: str
) -> None:
    job = Job(processes, address, trainers=2)
    generators = [job.well, *job.frail]
    job.push(1)
    for generator in generators:
        job.receive_on(generator, 1)
        ask(generator, "receive", timeout=TIMEOUT)
    frozen, other = job.trainers[victim], job.trainers[1 - victim]
    frozen.kill(signal.SIGSTOP)
    if pushing:
        ask(other, "push", version=2, timeout=TIMEOUT)
    else:
        ask(other, "wait_for_replicas", count=9, timeout=TIMEOUT)
    outcomes = [child.hear() for child in (other, *generators)]
    frozen.kill(signal.SIGCONT)
    told = call(frozen, "push", version=2, timeout=5)

    assert ["PeerError"] * 3 == [outcome.kind for outcome in outcomes]
    for outcome in outcomes:
        assert f"trainer rank {victim}" in outcome.value
        assert SILENT in outcome.value
        assert outcome.seconds < BOUND
    assert "PeerError" == told.kind
    assert "removed this process" in told.value
    assert told.seconds < 1.0
    for generator in generators:
        assert Held(1, 1) == call(generator, "held").value
    assert driven.close(*job.trainers, *generators) < 5.0


def test_a_trainer_rank_that_freezes_while_it_puts_leaves_no_half_version(
    processes: Processes, address: str
) -> None:
    before = driven.in_shared_memory()
    job = Job(processes, address, trainers=2, numel=256 * MIB, mode="inplace")
    (frail,), (other, frozen) = job.frail, job.trainers
    call(frail, "kill_at_first_byte", pid=frozen.pid, number=signal.SIGSTOP)
    ask(frail, "receive", timeout=TIMEOUT)
    job.start_push(1)
    ended = other.hear()
    if ended.kind == "ok":  # it had put everything before it froze
        ended = call(other, "push", version=2, timeout=TIMEOUT)
    told = _told(job.well)
    held = call(job.well, "held").value
    frozen.kill(signal.SIGCONT)
    late = frozen.hear()
    if late.kind == "ok":
        late = call(frozen, "push", version=2, timeout=TIMEOUT)

    for outcome in (ended, told):
        assert "PeerError" == outcome.kind
        assert f"trainer rank 1 {SILENT}" in outcome.value
        assert outcome.seconds < BOUND
    assert held in {Held(None, SENTINEL), Held(1, 1)}
    assert "PeerError" == late.kind
    assert "removed this process" in late.value
    assert held == call(job.well, "held").value
    assert driven.close(*job.trainers, job.well, frail) < 5.0
    assert before == driven.in_shared_memory()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep_through", "spin_through"])
def test_who_blocks_its_own_thread_for_several_leases_stays(
    how: str, processes: Processes, address: str
) -> None:
    job = Job(processes, address, trainers=2, ranks=2)
    everybody = [*job.trainers, job.well, *job.frail]
    for child in everybody:
        ask(child, how, seconds=3 * LEASE)
    for child in everybody:
        assert "ok" == child.hear().kind
    pushed = job.push(1)
    for generator in job.frail:
        ask(generator, "receive", timeout=10)
    job.receive_on(job.well, 1)
    received = [generator.hear() for generator in job.frail]

    assert {"well", "frail"} == set(pushed.value.delivered)
    assert [1, 1] == [outcome.value.version for outcome in received]
    assert driven.close(*everybody) < 5.0


def test_a_freeze_that_is_shorter_than_the_lease_changes_nothing(
    processes: Processes, address: str
) -> None:
    job = Job(processes, address)
    for child in (job.frail[0], job.trainers[0]):
        child.kill(signal.SIGSTOP)
        time.sleep(LEASE / 3)
        child.kill(signal.SIGCONT)
    pushed = job.push(1)
    for generator in (job.well, *job.frail):
        job.receive_on(generator, 1)

    assert {"well", "frail"} == set(pushed.value.delivered)
    assert driven.close(*job.trainers, job.well, *job.frail) < 5.0


def test_a_job_that_is_frozen_as_a_whole_goes_on_when_it_wakes(
    processes: Processes, address: str
) -> None:
    job = Job(processes, address, trainers=2)
    everybody = [*job.trainers, job.well, *job.frail]
    for child in everybody:
        child.kill(signal.SIGSTOP)
    time.sleep(2 * LEASE)
    for child in everybody:
        child.kill(signal.SIGCONT)
    pushed = job.push(1)
    for generator in (job.well, *job.frail):
        job.receive_on(generator, 1)

    assert {"well", "frail"} == set(pushed.value.delivered)
    assert driven.close(*everybody) < 5.0
