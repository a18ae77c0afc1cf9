"""What the two ranks of case ``backend`` do, each a process on a GPU of its own."""

from __future__ import annotations

import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from weightsync.bench.patterns import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

RANKS: Final = 2
OURS: Final = "weightsync-nccl2"
THEIRS: Final = "nccl2"

WORD_BYTES: Final = 4
BATCH: Final = 16
"""All-reduces of a batch: few enough that their sum fits the word."""

Measured = dict[str, list[float]]


def _reduce(word: Tensor, group: Any) -> None:
    dist.all_reduce(word, group=group)


def _reduce_later(word: Tensor, group: Any) -> None:
    dist.all_reduce(word, group=group, async_op=True).wait()


CALLS: Final[dict[str, Callable[[Tensor, Any], None]]] = {
    "all_reduce": _reduce,
    "all_reduce, asynchronous": _reduce_later,
}
"""What is issued: each doubles the word, once both ranks have the same."""


def measure(batches: int) -> tuple[int, Measured]:
    """Be one of the two ranks; return the bytes verified, and seconds by name."""
    importlib.import_module("weightsync.backend")  # registers ours
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group(THEIRS)
    groups = {THEIRS: dist.group.WORLD, OURS: dist.new_group(backend=OURS)}
    word = torch.empty(1, dtype=torch.int32, device=device)
    found: Measured = {f"{name} {call}": [] for name in groups for call in CALLS}
    verified = 0
    for batch in range(batches + 1):
        # Whoever comes first finds other caches than who comes second.
        names = (OURS, THEIRS) if batch % 2 else (THEIRS, OURS)
        for call in CALLS:
            for name in names:
                seconds = _batch(CALLS[call], word, groups[name], number + batch)
                verified += WORD_BYTES
                # The first batch makes the communicators.
                if batch > 0:
                    found[f"{name} {call}"] += seconds
    dist.destroy_process_group()
    return verified, found


def _batch(
    call: Callable[[Tensor, Any], None], word: Tensor, group: Any, value: int
) -> list[float]:
    """Time calls that follow each other at once; verify what they left."""
    word.copy_(torch.tensor([value], dtype=torch.int32))
    # Both ranks begin together, with nothing left to do.
    dist.barrier(group)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(BATCH):
        began = time.perf_counter()
        call(word, group)
        seconds.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    first = value - dist.get_rank()
    expected = (2 * first + 1) << (BATCH - 1)
    if (found := int(word.cpu()[0])) != expected:
        raise VerificationError(f"all-reduces gave {found}, expected {expected}")
    return seconds
