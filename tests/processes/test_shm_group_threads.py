"""Groups that are made and dropped while other threads use torch."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from tests.processes import ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.harness import Control, Processes


def _makes_groups_and_stores(control: Control) -> None:
    sys.setswitchinterval(1e-5)
    end = time.monotonic() + 4

    def repeat(work: Callable[[], object]) -> None:
        while time.monotonic() < end:
            work()

    works = [
        lambda: ranks.elastic(1),
        lambda: ranks.elastic(1),
        lambda: [dist.HashStore() for _ in range(50)],
        lambda: [dist.HashStore() for _ in range(50)],
    ]
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_making_groups_is_safe_beside_other_threads(processes: Processes) -> None:
    child = processes.start(_makes_groups_and_stores)
    child.result()

    assert 0 == child.join()
