"""What the two ranks of case ``backend`` do, each a process on a GPU of its own."""

from __future__ import annotations

import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from weightsync.bench.backend_calls import KINDS, Side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.bench.backend_calls import Kind

RANKS: Final = 2
OURS: Final = "weightsync-nccl2"
THEIRS: Final = "nccl2"

Measured = dict[str, list[list[float]]]
"""Seconds of each call, by backend and kind, batch by batch."""


def measure(batches: int) -> tuple[int, Measured]:
    """Be one of the two ranks; return the bytes verified, and what was measured."""
    importlib.import_module("weightsync.backend")  # registers ours
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group(THEIRS)
    groups: dict[str, Any] = {
        THEIRS: dist.group.WORLD,
        OURS: dist.new_group(backend=OURS),
    }
    sides = {name: Side(group, device) for name, group in groups.items()}
    found = _measured(sides, batches)
    for side in sides.values():
        side.close()
    dist.destroy_process_group()
    return found


def _measured(sides: dict[str, Side], batches: int) -> tuple[int, Measured]:
    kinds = {name: {kind: KINDS[kind](sides[name]) for kind in KINDS} for name in sides}
    found: Measured = {f"{name} {kind}": [] for name, kind in _turns(0)}
    verified = 0
    for batch in range(batches + 1):
        for name, kind in _turns(batch):
            seconds, more = _batch(kinds[name][kind], sides[name], batch)
            verified += more
            # The first batch makes what the first calls need.
            if batch > 0:
                found[f"{name} {kind}"].append(seconds)
    return verified, found


def _turns(batch: int) -> Iterator[tuple[str, str]]:
    """Whoever comes first finds other caches than who comes second."""
    names = (OURS, THEIRS) if batch % 2 else (THEIRS, OURS)
    for kind in KINDS:
        for name in names:
            yield name, kind


def _batch(kind: Kind, side: Side, number: int) -> tuple[list[float], int]:
    """Time calls that follow each other at once; verify what they left."""
    kind.prepare(number)
    _meet(side)
    seconds = []
    for index in range(kind.calls):
        began = time.perf_counter()
        kind.call(index)
        seconds.append(time.perf_counter() - began)
    _meet(side)
    return seconds, kind.check(number)


def _meet(side: Side) -> None:
    """Go on when both ranks have come, with nothing left to do."""
    dist.barrier(side.group)
    torch.cuda.synchronize()
