"""A frozen rank of a replica shows in the membership before its lease ends."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from tests.processes.driven import call, close
from tests.processes.returning import start_generators, start_trainers

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes
    from weightsync.membership import ReplicaMember

NUMEL = 4096
LEASE = 4.0


def _until(trainer: Child, rank: int) -> ReplicaMember:
    """Look at the replica until this rank is the one that was silent for longest."""
    deadline = time.monotonic() + 4 * LEASE
    while time.monotonic() < deadline:
        member: ReplicaMember = call(trainer, "membership").value.replicas["g"]
        if member.silent_rank == rank:
            return member
        time.sleep(0.02)  # nobody is told of it
    raise AssertionError(f"rank {rank} was never the silent one")


def test_a_frozen_rank_shows_in_the_membership_and_again_not_when_it_goes_on(
    processes: Processes, address: str
) -> None:
    trainers = start_trainers(processes, address, NUMEL, lease=LEASE)
    ranks = start_generators(processes, address, NUMEL, "staged", LEASE, ranks=3)
    assert ["open"] * 3 == [rank.hear() for rank in ranks]
    call(trainers[0], "wait_for_replicas", count=1)
    ranks[2].kill(signal.SIGSTOP)
    frozen = _until(trainers[0], 2)
    ranks[2].kill(signal.SIGCONT)
    well = _until(trainers[0], 0)
    close(*ranks, *trainers)

    assert (LEASE, LEASE) == (frozen.lease, well.lease)
    assert LEASE / 2 < frozen.silent < LEASE
    assert well.silent < LEASE / 2
