"""Engine "nccl" when NCCL fails, stalls or dies: what one trainer rank makes of it.

Any call of NCCL and CUDA: test_engine_nccl_matrix.py, test_engine_nccl_functions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import SENTINEL, Held, ask, call
from tests.processes.single import FAULTS, GRACE, TIMEOUT, Pool, delivered, joined
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.emulated import EmulatedProcesses

pytestmark = [testing.requires_emulator(), pytest.mark.emulated]

QUICK = {"a put is refused"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_trainer_that_dies_at_any_put_leaves_the_old_version(
    number: int, processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer = pool.trainer(f"put@n={number}:kill")
    generator = pool.generator()
    joined(trainer, 1)
    ask(generator, "receive", timeout=15)
    ask(trainer, "push", version=1, timeout=TIMEOUT)
    trainer.join()
    received = generator.hear()

    idle = call(generator, "synchronize")

    assert "PeerError" == received.kind, received
    assert "trainer" in received.value
    assert idle.seconds < 2
    assert Held(None, SENTINEL) == call(generator, "held").value
    assert driven.close(generator) < 5


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else SLOW) for case in FAULTS],
)
def test_a_push_that_nccl_fails_ends_in_time_and_for_its_replica_only(
    case: str, processes: EmulatedProcesses, address: str
) -> None:
    sending, receiving = FAULTS[case]
    pool = Pool(processes, address)
    trainer = pool.trainer(sending)
    broken = pool.generator(receiving)
    joined(trainer, 1)
    ask(broken, "receive", timeout=15)
    failed = call(trainer, "push", version=1, timeout=TIMEOUT)
    received = broken.hear()
    held = call(broken, "held").value
    healthy = pool.generator()
    joined(trainer, 1)
    pushed = delivered(trainer, healthy, 2)

    assert failed.kind in {"PeerError", "TimedOutError", "WeightSyncError"}, failed
    assert "gen-0" in failed.value
    assert failed.seconds < TIMEOUT + GRACE
    assert "ok" != received.kind
    assert Held(None, SENTINEL) == held
    assert (("gen-1",), {}) == (pushed.value.delivered, pushed.value.failed)
    assert driven.close(healthy) < 5
    assert driven.close(broken, trainer) < 10


def test_where_nccl_makes_no_windows_the_replica_is_told_why(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer, generator = pool.trainer("no-symmetric"), pool.generator("no-symmetric")
    received = call(generator, "receive", timeout=15)

    assert "PeerError" == received.kind, received
    assert "window" in received.value
    assert driven.close(generator, trainer) < 10


def test_a_replica_behind_a_network_that_dies_in_a_push_fails_alone(
    processes: EmulatedProcesses, address: str
) -> None:
    pool = Pool(processes, address)
    trainer, dies = pool.trainer("network=0-1"), pool.generator("network=0-1")
    joined(trainer, 1)
    watch = pool.generator()
    joined(trainer, 2)
    call(dies, "kill_at_first_byte", pid=dies.pid, number=9)
    pushed = delivered(trainer, watch, 1)
    again = delivered(trainer, watch, 2)

    assert ("gen-1",) == pushed.value.delivered
    assert {"gen-0"} == set(pushed.value.failed)
    assert ("gen-1",) == again.value.delivered
    assert driven.close(watch, trainer) < 10
