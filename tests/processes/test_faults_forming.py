"""Trainer rank 0 freezes while a link forms: nobody waits for longer than its lease."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes import driven
from tests.processes.driven import MIB, SENTINEL, Held, ask, call
from weightsync.link import TrainerLink
from weightsync.window import Window

if TYPE_CHECKING:
    from tests.processes.engines import Engine
    from tests.processes.harness import Control, Processes

LEASE = 2.0
GRACE = 3.0
CLOSE_SECONDS = 8.0
"""The end of a communicator takes 5 s at most; the rest is what a close takes."""

MOMENTS = {
    "before the ranks meet": (TrainerLink, "join"),
    "before windows are registered": (Window, "__init__"),
    "before windows are mapped": (Window, "connect"),
}


def _strike_before(kind: type, name: str, pid: int) -> None:
    """Stop another process when this one is about to do something."""
    original = getattr(kind, name)

    def striking(*args: Any, **options: Any) -> Any:
        os.kill(pid, signal.SIGSTOP)
        return original(*args, **options)

    setattr(kind, name, striking)


async def _striking_trainer(
    control: Control, moment: str, pid: int, *arguments: Any
) -> None:
    """A trainer rank that stops rank 0 while the first link forms."""
    _strike_before(*MOMENTS[moment], pid)
    await driven.trainer(control, *arguments)


# Fast by itself, but these take many seconds together.
PARAMETERS = [
    moment
    if moment == "before the ranks meet"
    else pytest.param(moment, marks=pytest.mark.slow)
    for moment in MOMENTS
]


@pytest.mark.parametrize("moment", PARAMETERS)
def test_a_link_that_forms_beside_a_frozen_trainer_rank_0_is_given_up_with_its_lease(
    moment: str, engine: Engine, processes: Processes, address: str
) -> None:
    options = (MIB, LEASE, engine.device)
    frozen = processes.start(driven.trainer, address, 0, 2, *options)
    assert frozen.hear() == "open"
    arguments = (moment, frozen.pid, address, 1, 2, *options)
    trainer = processes.start(_striking_trainer, *arguments)
    assert trainer.hear() == "open"
    joining = ("g", 0, 1, MIB, "staged", LEASE, engine.device)
    generator = processes.start(driven.generator, address, *joining)
    assert generator.hear() == "open"
    ask(generator, "receive", timeout=20)
    waited = call(trainer, "wait_for_replicas", count=1, timeout=20)
    received = generator.hear()
    held = call(generator, "held").value
    closed = driven.close(generator), driven.close(trainer)

    assert ("PeerError", "PeerError") == (waited.kind, received.kind), received
    assert "no sign of life" in waited.value
    assert max(waited.seconds, received.seconds) < LEASE + GRACE
    assert Held(None, SENTINEL) == held
    assert max(closed) < CLOSE_SECONDS
