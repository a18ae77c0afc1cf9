"""A pool in which a function of CUDA or NCCL fails while a link begins or ends.

The functions of NCCL that tests name by their operations, such as "put", are those of
test_engine_nccl_matrix.py; the first test here shows that no other is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.emulator.leftovers import eventually
from tests.processes import driven, nccl_functions
from tests.processes.driven import SENTINEL, Held, Outcome, call
from tests.processes.faulty import CALLED
from tests.processes.harness import ChildError
from tests.processes.nccl_cases import Case, parameters
from tests.processes.nccl_functions import cases, covered
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(60)]

TRAINERS = ("trainer-0", "trainer-1")
ASKED = {"ncclCommGetAsyncError"}
"""Of every link, several times a second, by a thread that sees to it."""


@pytest.mark.usefixtures("every_nccl")
def test_every_function_that_is_called_fails_in_some_test(pool: Pool) -> None:
    pool.train()
    pool.join("gen-0")
    pool.join("gen-1")
    formed, opened = pool.called(*TRAINERS), pool.called("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    pool.deliver(2, "gen-0", "gen-1")
    pushed, received = pool.called(*TRAINERS), pool.called("gen-1")
    driven.close(pool.replicas.pop("gen-1"))
    aborted = eventually(
        lambda: "ncclCommAbort" in pool.called("trainer-1").get("between", ())
    )
    closed = set(json.loads(pool.told("gen-1").rpartition(CALLED)[2]))
    ranks, f = ("leader", "trainer"), nccl_functions
    forming = f.FORMING, f.FIRST, f.OPENING, f.UNNOTICED_FORMING
    switching = f.SPOILING, f.SWITCHING, f.EITHER

    assert formed["between"] <= covered(ranks, *forming) | ASKED
    assert opened["opening"] <= covered(("generator",), *forming)
    assert opened["between"] <= covered(("generator",), *forming) | ASKED
    assert pushed["pushing"] <= covered(
        ranks, f.SPOILING, f.REFUSING, f.EITHER, f.ASKING
    )
    assert received["receiving"] <= covered(("generator",), *switching, f.ASKING)
    assert aborted
    assert closed <= covered(("generator",), f.LEAVING)
    assert pool.close() < 10


@pytest.mark.parametrize(
    "case",
    parameters(cases(nccl_functions.FORMING)),
)
def test_a_function_that_fails_while_a_link_forms_concerns_no_other(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    pool.train()
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    if case.who != "generator":
        pool.inject(case.log, case.faults, now=True)
    broken = pool.start("gen-1", case.of("generator"))
    opened = broken.hear()
    outcome: Outcome = call(broken, "receive", timeout=15)
    held = call(broken, "held").value
    pool.deliver(2, "gen-0")
    pool.come_back("gen-1", 3)

    assert "open" == opened
    assert "PeerError" == outcome.kind, outcome
    assert "removed from the pool" in outcome.value
    assert case.function in outcome.value
    assert Held(None, SENTINEL) == held
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.FIRST)))
def test_a_function_that_fails_for_the_first_link_is_called_again_for_the_next(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    pool.train()
    pool.inject(case.log, case.faults, now=True)
    broken = pool.start("gen-0")
    opened = broken.hear()
    outcome: Outcome = call(broken, "receive", timeout=15)
    pool.come_back("gen-0", 1)
    pool.join("gen-1")
    pool.deliver(2, "gen-0", "gen-1")

    assert "open" == opened
    assert "PeerError" == outcome.kind, outcome
    assert case.function in outcome.value
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.OPENING)))
def test_a_function_that_fails_where_a_generator_begins_is_told_there(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    pool.train()
    pool.join("gen-0")
    broken = pool.start("gen-1", case.faults)
    with pytest.raises(ChildError) as raised:
        broken.hear()
    del pool.replicas["gen-1"]
    pool.deliver(1, "gen-0")

    assert "weightsync.errors." in str(raised.value)
    assert case.function in str(raised.value)
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.UNNOTICED_FORMING)))
def test_a_function_may_fail_that_a_link_can_do_without(case: Case, pool: Pool) -> None:
    pool.nccl = case.nccl
    pool.train()
    pool.join("gen-0")
    pool.inject("trainer-1", case.of("trainer"), now=True)
    pool.join("gen-1", case.of("generator"))
    pool.deliver(1, "gen-0", "gen-1")
    pool.deliver(2, "gen-0", "gen-1")

    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize(
    "case",
    parameters(cases(nccl_functions.LEAVING)),
)
def test_a_function_that_fails_when_a_replica_leaves_holds_nobody_up(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    pool.train()
    pool.join("gen-0")
    pool.join("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    pool.inject(case.log, case.faults, now=case.who == "trainer")
    left = driven.close(pool.replicas.pop("gen-1"))
    failed = eventually(lambda: pool.faults(case.log) == 1)
    pool.deliver(2, "gen-0")
    pool.join("gen-2")
    pool.deliver(3, "gen-0", "gen-2")

    assert left < 10
    assert failed
    assert [] == pool.hangs
    assert pool.close() < 10
