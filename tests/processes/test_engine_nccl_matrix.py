"""What becomes of a pool when a call of NCCL goes wrong while a link forms.

Two trainer ranks and two replicas. The fault concerns one replica, or the trainers: the
other replica gets every version exactly and in time, and what was removed comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.emulator.leftovers import eventually
from tests.processes.driven import SENTINEL, Held, Outcome, ask, call
from tests.processes.faulty import GRACE, PUTS, TIMEOUT
from tests.processes.harness import ChildError
from tests.processes.nccl_cases import (
    CALLS,
    ERROR,
    GENERATOR_LINK,
    OF_GENERATOR,
    OF_TRAINER,
    TRAINER_LINK,
    Case,
    lost,
    parameters,
    restart,
)
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("every_nccl"),
]


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was called between two counts, but for allocations of torch and aborts."""
    found = {name: after[name] - before.get(name, 0) for name in after}
    return {
        name: count
        for name, count in found.items()
        if count and name not in {"malloc", "abort"}
    }


def test_these_are_all_calls_of_nccl_that_can_fail(pool: Pool) -> None:
    pool.train("*:trace")
    pool.join("gen-0", "*:trace")
    first = pool.calls("trainer-1")
    pool.join("gen-1", "*:trace")
    second = pool.calls("trainer-1")
    formed = pool.calls("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    third = pool.calls("trainer-1")
    received = pool.calls("gen-1")
    pool.deliver(2, "gen-0", "gen-1")

    assert {**TRAINER_LINK, "mem_alloc": 2} == since({}, first)
    assert TRAINER_LINK == since(first, second)
    assert GENERATOR_LINK == since({}, formed)
    assert {"put": 2 * PUTS} == since(second, third)
    assert {"put": 2 * PUTS} == since(third, pool.calls("trainer-1"))
    assert {"wait": 1} == since(formed, received)
    assert {"wait": 1} == since(received, pool.calls("gen-1"))
    assert pool.close() < 10


WINDOW: Final = ("generator", "mem_alloc", 1)
"""Allocates the window, before the replica says that it is there."""

FAILING: Final = [
    *(
        Case(who, f"{name}@n={n}:{ERROR}")
        for who, name, n in CALLS
        if (who, name, n) != WINDOW
    ),
    *(
        Case(who, f"{name}@n={n}:error=6")
        for who, name, n in CALLS
        if name == "all_gather"
    ),
    Case("generator", "no-symmetric"),
]
LASTING: Final = {"no-symmetric"}
"""Faults that do not go by."""


@pytest.mark.parametrize(
    "case",
    parameters(
        FAILING,
        "trainer: window_register@n=2:fail=3",
    ),
)
def test_a_call_that_fails_while_a_link_forms_concerns_no_other(
    case: Case, pool: Pool
) -> None:
    pool.train(case.of("trainer"))
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    broken = pool.start("gen-1", case.of("generator"))
    opened = broken.hear()
    ask(broken, "receive", timeout=15)
    pool.deliver(2, "gen-0")
    outcome, held = pool.received("gen-1")
    if case.faults in LASTING:
        pool.deliver(3, "gen-0")
    else:
        pool.come_back("gen-1", 3)

    assert "open" == opened
    assert "PeerError" == outcome.kind, outcome
    assert "removed from the pool" in outcome.value
    assert Held(None, SENTINEL) == held
    assert case.faults in LASTING or 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize(
    "faults",
    [
        "out-of-memory=32MiB",
        pytest.param("mem_alloc@n=1:fail=2", marks=pytest.mark.slow),
    ],
)
def test_a_generator_without_memory_for_its_window_says_so_where_it_begins(
    faults: str, pool: Pool
) -> None:
    pool.train()
    pool.join("gen-0")
    broken = pool.start("gen-1", faults)
    with pytest.raises(ChildError) as raised:
        broken.hear()
    del pool.replicas["gen-1"]
    pool.deliver(1, "gen-0")

    assert "WeightSyncError: OutOfMemoryError: NCCL has no " in str(raised.value)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.slow
def test_trainers_without_staging_memory_say_so_to_every_replica(pool: Pool) -> None:
    pool.train("out-of-memory=32MiB")
    broken = pool.start("gen-0")
    assert "open" == broken.hear()
    outcome = call(broken, "receive", timeout=15)
    pool.begin(1)
    pushed = pool.pushed()

    assert "PeerError" == outcome.kind, outcome
    assert "trainer rank 1: OutOfMemoryError" in outcome.value
    assert ["PeerError", "PeerError"] == [each.kind for each in pushed]
    assert "no replica has joined" in pushed[0].value
    assert [] == pool.hangs
    assert pool.close() < 10


STUCK: Final = [
    Case(who, f"{name}@n={n}:{action}; set-apart")
    for who, name, n in CALLS
    for action in (["stall", "block"] if name == "all_gather" else ["stall"])
]


@pytest.mark.parametrize(
    "case", parameters(STUCK, "trainer: wait@n=2:stall; set-apart")
)
def test_a_call_that_never_ends_while_a_link_forms_concerns_no_other(
    case: Case, pool: Pool
) -> None:
    pool.train(case.of("trainer"))
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    broken = pool.start("gen-1", case.of("generator"))
    pool.deliver(2, "gen-0")
    if broken.poll(3.0):
        assert "open" == broken.hear()
        waited: Outcome = call(broken, "receive", timeout=1)
        held = call(broken, "held").value

        assert "TimedOutError" == waited.kind
        assert Held(None, SENTINEL) == held
    else:
        del pool.replicas["gen-1"]  # it is stuck where it begins, and hears nothing
    pool.deliver(3, "gen-0")
    stalled = eventually(lambda: pool.faults(case.log) == 1)

    assert stalled
    assert [] == pool.hangs
    assert pool.close() < 10


KILLED_FORMING: Final = [
    Case("generator", f"{name}@n={n}:kill") for name, n in OF_GENERATOR
]


@pytest.mark.parametrize(
    "case", parameters(KILLED_FORMING, "generator: window_register@n=1:kill")
)
def test_a_replica_that_dies_while_its_link_forms_concerns_no_other(
    case: Case, pool: Pool
) -> None:
    pool.train()
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    pool.start("gen-1", case.faults)
    pool.replicas.pop("gen-1").join()
    pool.deliver(2, "gen-0")
    pool.join("gen-2")
    pool.deliver(3, "gen-0", "gen-2")

    assert 1 == pool.faults("gen-1")
    assert [] == pool.hangs
    assert pool.close() < 10


DYING_FORMING: Final = [Case("trainer", f"{name}@n={n}:kill") for name, n in OF_TRAINER]


@pytest.mark.parametrize("case", parameters(DYING_FORMING))
def test_a_trainer_that_dies_while_a_link_forms_leaves_whole_versions(
    case: Case, pool: Pool
) -> None:
    pool.train(case.faults)
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    assert "open" == pool.start("gen-1").hear()
    pool.trainers[1].join()
    pushed: Outcome = call(pool.trainers[0], "push", version=2, timeout=TIMEOUT)
    held = [lost(pool, name) for name in ("gen-0", "gen-1")]
    restart(pool, 3)

    assert "PeerError" == pushed.kind, pushed
    assert "trainer rank 1" in pushed.value
    assert pushed.seconds < TIMEOUT + GRACE
    assert [Held(1, 1), Held(None, SENTINEL)] == held
    assert 1 == pool.faults("trainer-1")
    assert [] == pool.hangs
    assert pool.close() < 10
