"""What becomes of a pool when a call of NCCL goes wrong in a push.

As in test_engine_nccl_matrix.py, which shows that puts and waits are all there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.processes.driven import MIB, Held, Outcome, ask, call
from tests.processes.faulty import GRACE, PUTS, TIMEOUT
from tests.processes.nccl_cases import ERROR, Case, lost, parameters, restart
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("every_nccl"),
]

FIRST: Final = 2 * PUTS + 1
"""The first put of a trainer rank in the second push, to either replica."""

PUT: Final = range(FIRST, FIRST + 2 * PUTS)
SECOND_WAIT: Final = 3
"""Of a generator rank; one is made when its link forms, one for each push."""

SPOILING: Final = [
    *(Case("trainer", f"put@n={n}:{ERROR}") for n in PUT),
    *(Case("trainer", f"put@n={n}:stall; set-apart") for n in PUT),
    Case("trainer", f"network=1-2; put@n={FIRST + 2}:stall; set-apart"),
    Case("generator", f"wait@n={SECOND_WAIT}:{ERROR}"),
    Case("generator", f"wait@n={SECOND_WAIT}:stall; set-apart"),
]


@pytest.mark.parametrize(
    "case", parameters(SPOILING, f"trainer: put@n={FIRST + 1}:fail=3")
)
def test_a_push_that_nccl_spoils_is_spoilt_for_one_replica(
    case: Case, pool: Pool
) -> None:
    pool.train(case.of("trainer"))
    names = {"gen-0", "gen-1"}
    pool.join("gen-0")
    pool.join("gen-1", case.of("generator"))
    pool.deliver(1, *names)
    pool.begin(2, *names)
    outcomes = pool.pushed()
    got = {name: pool.received(name) for name in names}
    report = outcomes[0].value
    (failed,) = report.failed
    (other,) = names - {failed}
    pool.come_back(failed, 3)

    assert ["ok", "ok"] == [each.kind for each in outcomes]
    assert report == outcomes[1].value
    assert (other,) == report.delivered
    assert named(case) in report.failed[failed], report.failed
    assert ("ok", Held(2, 2)) == (got[other][0].kind, got[other][1])
    assert got[failed][0].kind in {"PeerError", "WeightSyncError"}
    assert Held(1, 1) == got[failed][1]
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


def named(case: Case) -> str:
    """What the reason of a failure names: the call, or what did not come in time."""
    if "fail=" in case.faults:
        return "ncclPutSignal" if case.who == "trainer" else "ncclWaitSignal"
    return "timed out: not all was put" if case.who == "trainer" else "timed out"


@pytest.mark.slow
def test_a_replica_that_dies_at_its_wait_is_named_and_concerns_no_other(
    pool: Pool,
) -> None:
    pool.train()
    pool.join("gen-0")
    pool.join("gen-1", f"wait@n={SECOND_WAIT}:kill")
    pool.deliver(1, "gen-0", "gen-1")
    ask(pool.replicas["gen-1"], "receive", timeout=15)
    pool.begin(2, "gen-0")
    outcomes = pool.pushed()
    received, held = pool.received("gen-0")
    pool.replicas.pop("gen-1").join()
    pool.deliver(3, "gen-0")

    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert ("ok", Held(2, 2)) == (received.kind, held)
    assert [] == pool.hangs
    assert pool.close() < 10


ARRIVING: Final = {
    0: "the first put of rank 0",
    8: "its second",
    10: "the first put of rank 1",
    18: "its second, after which its header comes",
}
"""In MiB, where the first byte of a put arrives."""


@pytest.mark.parametrize(
    "at",
    [pytest.param(at, marks=() if at == 8 else pytest.mark.slow) for at in ARRIVING],
)
def test_a_replica_that_dies_at_any_put_is_named_and_concerns_no_other(
    at: int, pool: Pool
) -> None:
    pool.train(f"put@from={FIRST}:delay=0.1")
    pool.join("gen-0")
    broken = pool.join("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    call(broken, "kill_at_first_byte", pid=broken.pid, number=9, at=at * MIB)
    ask(broken, "receive", timeout=15)
    pool.begin(2, "gen-0")
    outcomes = pool.pushed()
    received, held = pool.received("gen-0")
    pool.replicas.pop("gen-1").join()
    pool.deliver(3, "gen-0")

    assert ["ok", "ok"] == [each.kind for each in outcomes]
    assert outcomes[0].value == outcomes[1].value
    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert ("ok", Held(2, 2)) == (received.kind, held)
    assert [] == pool.hangs
    assert pool.close() < 10


DYING: Final = [Case("trainer", f"put@n={n}:kill") for n in PUT]


@pytest.mark.parametrize("case", parameters(DYING, f"trainer: put@n={FIRST + 3}:kill"))
def test_a_trainer_that_dies_at_any_put_leaves_whole_versions(
    case: Case, pool: Pool
) -> None:
    pool.train(case.faults)
    pool.join("gen-0")
    pool.join("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    pool.begin(2)
    pushed: Outcome = pool.trainers[0].hear()
    held = {lost(pool, name) for name in pool.replicas}
    restart(pool, 3)

    assert "PeerError" == pushed.kind, pushed
    assert "trainer rank 1" in pushed.value
    assert pushed.seconds < TIMEOUT + GRACE
    assert held <= {Held(1, 1), Held(2, 2)}
    assert 1 == pool.faults("trainer-1")
    assert [] == pool.hangs
    assert pool.close() < 10
