"""What the two ranks of case ``emulator`` do, each a process on a GPU of its own."""

from __future__ import annotations

import ctypes
import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from weightsync.bench.emulator_abi import Abi, Rank, unique_id
from weightsync.bench.memory import Memcpy
from weightsync.bench.patterns import VerificationError, fill, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

RANKS: Final = 2
REDUCED: Final = ("c", "nccl", "nccl2")
"""By whom the all-reduces are made: C, and torch's two backends."""

WORD_BYTES: Final = 4
BATCH: Final = 16
"""All-reduces of a batch that are counted: few enough that their sum fits the word."""

MOST_BATCHES: Final = 4000

Measured = dict[str, list[float]]


def measure(size: int, puts: int, batches: int) -> tuple[int, Measured]:
    """Be one of the two ranks; return the bytes verified, and seconds by name."""
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        RANKS,
        is_master=number == 0,
    )
    found: Measured = {}
    verified = _measure_c(store, number, (size, puts, batches), found)
    for backend in ("nccl", "nccl2"):
        group = dist.PrefixStore(backend, store)
        found[backend] = _reduce_by_torch(backend, group, number, batches)
    return verified + len(REDUCED) * (batches + 1) * WORD_BYTES, found


def _measure_c(
    store: dist.Store, number: int, what: tuple[int, int, int], found: Measured
) -> int:
    size, puts, batches = what
    abi = Abi()
    if number == 0:
        store.set("communicator", unique_id(abi).hex())
    meeting = bytes.fromhex(store.get("communicator").decode())
    rank = Rank(abi, number, RANKS, meeting)
    window = _tensor(rank.register(2 * size), 2 * size)
    window.fill_(1)
    found["c"] = _reduce_by_c(rank, window, batches)
    verified = _put(rank, window, puts, found)
    rank.close()
    return verified


def _tensor(address: int, nbytes: int) -> Tensor:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _reduce_by_c(rank: Rank, window: Tensor, batches: int) -> list[float]:
    word = window[:WORD_BYTES].view(torch.int32)

    def exchange(value: int | None) -> int:
        if value is not None:
            word[0] = value
        return int(word[0])

    return _time(rank.rank, batches, rank.all_reduce, exchange)


def _reduce_by_torch(
    backend: str, store: dist.Store, number: int, batches: int
) -> list[float]:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=number, world_size=RANKS)
    word = torch.empty(1, dtype=torch.int32, device=device)

    def reduce() -> None:
        dist.all_reduce(word)
        torch.cuda.synchronize()

    def exchange(value: int | None) -> int:
        if value is not None:
            word.copy_(torch.tensor([value], dtype=torch.int32))
        return int(word.cpu()[0])

    found = _time(number, batches, reduce, exchange)
    dist.destroy_process_group()
    return found


def _time(
    number: int,
    batches: int,
    reduce: Callable[[], None],
    exchange: Callable[[int | None], int],
) -> list[float]:
    """Time all-reduces that follow each other at once; verify at the end of a batch.

    ``exchange`` writes the word of this rank where it is given one, and reads it. The
    first of a batch is not counted: it waits for the slower of the ranks.
    """
    found: list[float] = []
    for batch in range(batches + 1):
        exchange(RANKS * batch + number)
        ends = [time.perf_counter()]
        for _ in range(BATCH + 1):
            reduce()
            ends.append(time.perf_counter())
        expected = (2 * RANKS * batch + 1) << BATCH
        if (summed := exchange(None)) != expected:
            message = f"all-reduces gave {summed}, expected {expected}"
            raise VerificationError(message)
        if batch > 0:
            found += [after - before for before, after in pairwise(ends[1:])]
    return found


def _put(rank: Rank, window: Tensor, puts: int, found: Measured) -> int:
    """Let rank 0 put and rank 1 verify; the first put does not count."""
    source, target = window.chunk(2)
    copy = Memcpy(len(source)) if rank.rank == 0 else None
    seconds: list[Any] = []
    for repetition in range(puts + 1):
        if copy is not None:
            fill(source, repetition)
            seconds.append(_put_and_copy(rank, source, copy, repetition))
            rank.wait(1)
        else:
            rank.wait(0)
            verify(target, repetition, what=f"put {repetition}")
            rank.signal(0)
    if copy is None:
        return (puts + 1) * len(source)
    copy.close()
    found["put"] = [put for put, _ in seconds[1:]]
    found["memcpy"] = [copied for _, copied in seconds[1:]]
    return 0


def _put_and_copy(
    rank: Rank, source: Tensor, copy: Memcpy, repetition: int
) -> tuple[float, float]:
    """Time a put and a memcpy of the same bytes; which comes first alternates."""
    before = copy.seconds(source, len(source)) if repetition % 2 else None
    began = time.perf_counter()
    rank.put(1, len(source))
    put = time.perf_counter() - began
    return put, copy.seconds(source, len(source)) if before is None else before
