"""Jobs of several trainers and replicas crash, over and over, beside one that lives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.processes import driven
from tests.processes.driven import MIB
from tests.processes.engines import slow_on_nccl
from tests.processes.harness import free_address
from tests.processes.pools import Pool, mebibytes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.engines import Engine
    from tests.processes.harness import Processes

SMALL = MIB


class Living:
    """A job that pushes again and again in a thread, and how that went."""

    def __init__(self, pool: Pool, pause: float) -> None:
        self._pool = pool
        self._pause = pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._push)
        self.versions = 0
        self.failed: list[object] = []
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(20)

    def _push(self) -> None:
        names = tuple(self._pool.replicas)
        while not self._ended.wait(self._pause):
            self.versions += 1
            pushed = self._pool.deliver(self.versions, *names)
            if pushed.kind != "ok" or pushed.value.delivered != names:
                self.failed.append(pushed)


def _run(processes: Processes, address: str, numel: int) -> Pool:
    """Two trainer ranks, a replica of one rank and one of two; pushed to once."""
    pool = Pool(processes, address, numel=numel)
    pool.join("solo", mode="swap")
    pool.join("pair", ranks=2)
    pool.deliver(1, "solo", "pair")
    return pool


@slow_on_nccl
@pytest.mark.parametrize("kind", ["tcp", "file"])
@pytest.mark.timeout(150)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_crashes_of_whole_jobs_leave_nothing_and_disturb_no_living_one(
    kind: str,
    full: bool,
    engine: Engine,
    processes: Processes,
    address: str,
    tmp_path: Path,
) -> None:
    before = driven.in_shared_memory()
    crashes, numel = (5, mebibytes(64, engine)) if full else (2, 8 * MIB)
    other = f"file://{tmp_path}/store" if kind == "file" else free_address()
    healthy = Pool(processes, address, numel=SMALL)
    healthy.join("Y0")
    healthy.join("Y1", ranks=2)
    living = Living(healthy, 0.1)
    left = []
    try:
        for _ in range(crashes):
            pool = _run(processes, other, numel)
            ranks = [rank for ranks in pool.replicas.values() for rank in ranks]
            for child in (*pool.trainers, *ranks):
                child.kill()
            for child in (*pool.trainers, *ranks):
                child.join()
            left.append(driven.in_shared_memory() - before)
        last = _run(processes, other, numel)
        closed = last.close()
    finally:
        living.end()

    assert [set()] * crashes == left
    assert closed < 5.0
    assert [] == living.failed
    assert living.versions > crashes
    assert healthy.close() < 5.0
    assert before == driven.in_shared_memory()
