"""A rank that is killed leaves nothing, and the others end with the reason."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.emulator.leftovers import left_by, shared_memory
from tests.emulator.walk import OPERATIONS, Walk, in_second_round
from weightsync import testing
from weightsync.testing.environment import HANG_EXIT_CODE

if TYPE_CHECKING:
    from weightsync.testing import Outcome

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("collected"),
]

ROOT = Path(__file__).parents[2]

HANG_SECONDS = 0.5
"""So short that a rank which is merely slow may be taken for one that hangs. All that
is asked here is that nobody waits for ever."""

# One of each kind; the others run with the slow tests.
OFTEN = ("all_reduce", "put", "window_register", "init", "destroy")
SLOW = pytest.mark.slow


def some_often(names: tuple[str, ...]) -> list[object]:
    return [name if name in OFTEN else pytest.param(name, marks=SLOW) for name in names]


# What ranks do. Their numbers are the last that they tell before they are killed.


def tell() -> None:
    print("process", os.getpid(), "of nursery", os.getppid(), flush=True)


def walk_and_tell() -> None:
    tell()
    Walk().go()


def walk_until_killed(seconds: float) -> None:
    """Walk for ever; rank 1 is killed after a while, wherever it is then."""
    tell()
    rank = Walk()
    if rank.rank == 1:
        killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    for _ in range(100_000):
        rank.go()


PROGRAM = """
import os, signal, threading
seconds = float(os.environ["KILL_AFTER"])
if os.environ["RANK"] == "1":
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
from tests.emulator.walk import Walk
while True:
    Walk(store_seconds=5).go()
"""


def start_programs(seconds: float) -> list[subprocess.Popen[str]]:
    """Start both ranks as programs of their own, as torchrun does."""
    variables = {
        **os.environ,
        **testing.environment(gpus=2, hang_seconds=HANG_SECONDS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "KILL_AFTER": str(seconds),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**variables, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_ended(found: list[Outcome], before: set[str]) -> None:
    """Rank 1 was killed, rank 0 says what is wrong, and nothing is left of both."""
    told = [each.output.partition("process ")[2].split() for each in found]
    ranks = [int(words[0]) for words in told]
    nursery = int(told[0][3])

    assert -signal.SIGKILL == found[1].exit_code, found[1].output
    assert not found[0].late, found[0].output
    assert found[0].hung or "Error" in found[0].output
    assert not found[0].ok
    assert {} == left_by(ranks, [os.getpid(), nursery], before)


@pytest.mark.parametrize("operation", some_often(OPERATIONS))
def test_a_rank_may_be_killed_in_every_operation(operation: str) -> None:
    before = shared_memory()
    found = testing.outcomes(
        *(walk_and_tell, 2),
        faults=f"{operation}@rank=1,n={in_second_round(operation)}:kill",
        hang_seconds=HANG_SECONDS,
        timeout=20,
    )

    assert f"as the fault '{operation}@rank=1" in found[1].output
    assert_ended(found, before)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [3, pytest.param(100, marks=SLOW)])
def test_a_rank_may_be_killed_at_any_moment(moments: int) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    chosen = random.Random(seed)
    for _ in range(moments):
        before = shared_memory()
        seconds = chosen.uniform(0, 0.3)
        print("killed after", seconds)
        found = testing.outcomes(
            *(walk_until_killed, 2),
            args=[seconds],
            hang_seconds=HANG_SECONDS,
            timeout=20,
        )
        assert_ended(found, before)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [1, pytest.param(10, marks=SLOW)])
def test_a_program_may_be_killed_while_it_starts(moments: int) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    chosen = random.Random(seed)
    for _ in range(moments):
        before = shared_memory()
        seconds = chosen.uniform(0, 4)
        print("killed after", seconds)
        first, second = start_programs(seconds)
        try:
            # It may wait for its peer in torch's store, which has a limit of its own.
            said = first.communicate(timeout=60)[1]
        finally:
            second.kill()
            first.kill()
            second.communicate()

        assert -signal.SIGKILL == second.returncode
        assert first.returncode in {1, HANG_EXIT_CODE}, said
        assert "Error" in said or "weightsync emulator" in said
        assert {} == left_by([first.pid, second.pid], [os.getpid()], before)
