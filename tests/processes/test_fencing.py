"""Old trainers that were stalled: no byte or signal of theirs reaches anybody."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import Outcome, ask, call, close
from tests.processes.returning import (
    MODES,
    Seen,
    call_all,
    deliver,
    kinds,
    start_generators,
    start_trainers,
    trainer,
    values,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.engines import Engine
    from tests.processes.harness import Child, Processes
    from tests.processes.rig import Mode

pytestmark = pytest.mark.usefixtures("engine")

NUMEL = {"shm": 128 << 20, "nccl": 32 << 20}
"""Enough for a stop at the first byte to come before the last."""

LEASE = 3.0
OLD = 111
"""Of every byte that the old trainers put when they are stopped, or a little more."""


@pytest.fixture
def file_address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def _stall(trainers: list[Child], generator: Child, value: int) -> Outcome:
    """Stop trainers in the middle of a put; return what the generator is told."""
    pids = [rank.pid for rank in trainers]
    stop = signal.SIGSTOP
    call(generator, "strike_at_first_byte", value=value, pids=pids, number=stop)
    ask(generator, "receive", timeout=30)
    for rank in trainers:
        ask(rank, "push", value=value, timeout=30)
    told: Outcome = generator.hear()
    assert (told.kind != "ok") == call(generator, "in_time").value
    return told


def _stall_in_a_put(old: list[Child], generators: list[Child]) -> int:
    """Stop trainers in the middle of a put; return the last version before."""
    last = deliver(old, generators, value=1)[0][1]
    for value in range(OLD, OLD + 10):
        told = _stall(old, generators[0], value)
        if told.kind != "ok":
            assert "PeerError" == told.kind
            return last
        # They were through with it before they could be stopped.
        assert {"ok"} == kinds([rank.hear() for rank in old])
        last = told.value.version
    raise AssertionError("they were never stopped in time")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_byte_of_stalled_trainers_reaches_a_generator_of_the_new_ones(
    processes: Processes, file_address: str, mode: Mode, engine: Engine
) -> None:
    numel = NUMEL[engine.name]
    generators = start_generators(processes, file_address, numel, mode, LEASE)
    old = start_trainers(processes, file_address, numel, lease=LEASE)
    generators[0].hear()
    last = _stall_in_a_put(old, generators)

    new = start_trainers(processes, file_address, numel, lease=LEASE)
    delivered = deliver(new, generators, value=2)
    if mode != "inplace":  # where it waits in the window for its switch
        values(call_all(new, "push", value=3))
    for rank in old:
        rank.kill(signal.SIGCONT)
    pushed = [rank.hear() for rank in old]
    seen = values(call_all(generators, "see"))
    delivered += _receive_third(new, generators, mode)
    seen += values(call_all(generators, "see"))
    delivered += deliver(new, generators, value=4)
    seen += values(call_all(generators, "see"))

    assert [(0, last + 1), (0, last + 2), (0, last + 3)] == delivered
    assert [Seen(last + value - 1, 0, value) for value in (2, 3, 4)] == seen

    after = call_all(old, "push", value=OLD, timeout=5)
    events = values(call_all(old, "event", kind="fenced"))
    close(*generators, *new, *old)

    fenced = "other trainers have taken over job 'default': their term is 2"
    assert {"FencedError"} == kinds(pushed + after)
    assert all(fenced in outcome.value for outcome in pushed + after)
    assert all(fenced in event for event in events)


def _receive_third(
    trainers: list[Child], generators: list[Child], mode: Mode
) -> list[tuple[int, int]]:
    """Receive version 3, which was pushed already unless it arrives in place."""
    if mode == "inplace":
        return deliver(trainers, generators, value=3)
    updates = values(call_all(generators, "receive", timeout=20))
    return [(update.epoch, update.version) for update in updates]


def test_trainers_that_are_started_twice_leave_the_job_to_the_later_ones(
    processes: Processes, file_address: str
) -> None:
    generators = start_generators(processes, file_address, 4096)
    old = start_trainers(processes, file_address, 4096)
    generators[0].hear()
    delivered = deliver(old, generators, value=1)
    new = [processes.start(trainer, file_address, 0, 2, 4096)]
    assert "open" == new[0].hear()  # from now on it is found, and not the old one
    new.append(processes.start(trainer, file_address, 1, 2, 4096))
    assert "open" == new[1].hear()
    told = call(generators[0], "receive", timeout=10)
    refused = call_all(old, "push", value=9, timeout=5)
    delivered += deliver(new, generators, value=2)
    seen = values(call_all(generators, "see"))
    terms = [child.term for child in values(call_all(new, "membership"))]
    close(*generators, *new, *old)

    assert ["FencedError"] * 3 == [outcome.kind for outcome in (told, *refused)]
    assert told.seconds < 5.0
    assert [(0, 1), (0, 2)] == delivered
    assert [Seen(2, 0, 2)] == seen
    assert [2, 2] == terms
