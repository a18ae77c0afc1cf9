"""What NCCL does not end is set apart and told; everything else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.emulator.leftovers import eventually
from tests.processes.driven import STREAMS, Held, call
from tests.processes.faulty import GRACE, TIMEOUT
from weightsync import testing
from weightsync.quarantine import LEFT_BEHIND

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(60)]

LIMIT = TIMEOUT + GRACE
"""After so long a hang is diagnosed: what has been aborted by then is none."""

DEAD = "network=1-2; put@from=7:delay=0.1; set-apart"
"""Of trainer rank 1: its puts of the second push are so slow that the peer dies."""


def spoil(pool: Pool) -> None:
    """Let replica "gen-1" die in the second push, with puts to it under way."""
    pool.train(DEAD)
    pool.join("gen-0", "network=1-2")
    broken = pool.join("gen-1", "network=1-2")
    pool.deliver(1, "gen-0", "gen-1")
    call(broken, "kill_at_first_byte", pid=broken.pid, number=9)
    pool.begin(2, "gen-0")
    outcomes = pool.pushed()
    received, held = pool.received("gen-0")
    del pool.replicas["gen-1"]

    assert ["ok", "ok"] == [each.kind for each in outcomes], outcomes
    assert ("gen-0",) == outcomes[0].value.delivered
    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert ("ok", Held(2, 2)) == (received.kind, held)


def test_a_put_that_never_completes_is_set_apart_and_told(pool: Pool) -> None:
    pool.processes.hang_seconds = LIMIT
    spoil(pool)
    told = [call(each, "event", kind="quarantined").value for each in pool.trainers]
    members = call(pool.trainers[1], "membership").value
    for version in (3, 4, 5):
        pool.deliver(version, "gen-0")
    later = pool.join("gen-2", "network=1-2")
    pool.deliver(6, "gen-0", "gen-2")
    set_apart = eventually(lambda: "set apart: rank 1 of 3" in pool.told("trainer-1"))
    pool.deliver(7, "gen-0", "gen-2")
    log = pool.told("trainer-1")

    assert set_apart
    assert told[0] == told[1]
    assert ("replica", "gen-1") == (told[0].role, told[0].name)
    assert f"trainer rank 1: {LEFT_BEHIND}" == told[0].reason
    assert [0, 1] == [trainer.quarantined for trainer in members.trainers]
    assert "to replica 'gen-1'" in log
    assert LEFT_BEHIND in log
    assert Held(7, 7) == call(later, "held").value
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.slow
def test_no_stream_that_torch_gives_away_waits_for_it(pool: Pool) -> None:
    spoil(pool)
    call(pool.trainers[1], "event", kind="quarantined")
    used = call(pool.trainers[1], "use_streams", count=STREAMS)

    assert "ok" == used.kind
    assert used.seconds < 5
    assert pool.close() < 10


@pytest.mark.slow
def test_a_wait_that_never_ends_is_set_apart_and_its_replica_comes_back(
    pool: Pool,
) -> None:
    pool.processes.hang_seconds = LIMIT
    pool.train()
    pool.join("gen-0")
    broken = pool.join("gen-1", "wait@n=3:stall; set-apart")
    pool.deliver(1, "gen-0", "gen-1")
    pool.begin(2, "gen-0", "gen-1")
    outcomes = pool.pushed()
    received, held = pool.received("gen-1")
    pool.received("gen-0")
    used = call(broken, "use_streams", count=STREAMS)
    pool.come_back("gen-1", 3)
    set_apart = eventually(lambda: "set apart: rank 2 of 3" in pool.told("gen-1"))
    pool.deliver(4, "gen-0", "gen-1")

    assert set_apart
    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert "PeerError" == received.kind
    assert Held(1, 1) == held
    assert "ok" == used.kind
    assert f"link of generator rank 0>: {LEFT_BEHIND}" in pool.told("gen-1")
    assert [] == pool.hangs
    assert pool.close() < 10
