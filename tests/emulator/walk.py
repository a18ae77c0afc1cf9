"""A program of two ranks that calls every operation that a fault can name.

What ranks do in test_fault_kinds.py and test_killed.py. Each operation is called once
in each round, and waited for.
"""

from __future__ import annotations

import os
import time
from ctypes import byref, c_int, c_void_p
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from tests.emulator.abi import everything
from weightsync.bench.emulator_abi import (
    INT32,
    SUM,
    SYMMETRIC,
    UINT8,
    CallError,
    UniqueId,
    WaitDescription,
    unique_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 4096
ROUNDS = 3

COLLECTIVES: dict[str, tuple[str, tuple[int, ...]]] = {
    "all_reduce": ("ncclAllReduce", (SUM,)),
    "reduce": ("ncclReduce", (SUM, 0)),
    "broadcast": ("ncclBroadcast", (0,)),
    "all_gather": ("ncclAllGather", ()),
    "reduce_scatter": ("ncclReduceScatter", (SUM,)),
    "all_to_all": ("ncclAlltoAll", ()),
    "gather": ("ncclGather", (0,)),
    "scatter": ("ncclScatter", (0,)),
}


OPERATIONS = (
    *("malloc", "mem_alloc", "init", "register", "window_register", *COLLECTIVES),
    *("send", "recv", "put", "signal", "wait", "split", "shrink", "grow", "revoke"),
    *("abort", "finalize", "destroy"),
)


def in_second_round(operation: str) -> int:
    """Which occurrence it is that the second round attempts."""
    # mem_alloc is one of malloc as well; three communicators are destroyed in a round.
    return {"malloc": 3, "destroy": 6}.get(operation, 2)


class Walk:
    """One of the two ranks; ``codes`` and ``seconds`` are by operation and round.

    A code of 0 is success. What an operation that failed would have made is left out.
    """

    def __init__(self, store_seconds: float = 15.0) -> None:
        self.rank = int(os.environ["RANK"])
        self.peer = 1 - self.rank
        self.codes: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.abi = everything()
        self.stream = c_void_p()
        self.base = c_void_p()
        self.memory = c_void_p()
        self.window = c_void_p()
        self.turn = 0
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            2,
            is_master=self.rank == 0,
            # A peer that was killed before it came is waited for that long.
            timeout=timedelta(seconds=store_seconds),
        )
        self.abi("cudaSetDevice", self.rank)
        self.abi("cudaStreamCreate", byref(self.stream))

    def go(self) -> None:
        """Do everything in every round."""
        for self.turn in range(ROUNDS):
            self.allocate()
            self.begin()
            self.collect()
            self.put()
            self.relate()
            self.end()

    def attempt(self, operation: str, call: Callable[[], object]) -> bool:
        """Count what became of an operation; False if it failed."""
        began = time.monotonic()
        code = 0
        try:
            call()
            self.synchronize()
        except CallError as error:
            code = error.code
        self.seconds.setdefault(operation, []).append(time.monotonic() - began)
        self.codes.setdefault(operation, []).append(code)
        return code == 0

    def synchronize(self) -> None:
        self.abi("cudaStreamSynchronize", self.stream)

    def share(self, name: str, make: Callable[[], bytes], root: int = 0) -> UniqueId:
        """Give all ranks what one of them makes."""
        key = f"{name}-{self.turn}"
        if self.rank == root:
            self.store.set(key, make())
        return UniqueId.from_buffer_copy(self.store.get(key))

    def allocate(self) -> None:
        address = c_void_p()
        if self.attempt("malloc", lambda: self.abi("cudaMalloc", byref(address), 1)):
            self.abi("cudaFree", address)
        self.attempt("mem_alloc", lambda: self.allocate_for_window(self.memory))
        if self.codes["mem_alloc"][-1]:
            self.allocate_for_window(self.memory)

    def allocate_for_window(self, address: c_void_p) -> None:
        self.abi("ncclMemAlloc", byref(address), NBYTES)

    def begin(self) -> None:
        if not self.attempt("init", lambda: self.open("first")):
            self.open("again")
        handle, memory = c_void_p(), self.memory
        where = (self.base, memory, NBYTES)
        register = ("ncclCommRegister", *where, byref(handle))
        if self.attempt("register", lambda: self.abi(*register)):
            self.abi("ncclCommDeregister", self.base, handle)
        window = ("ncclCommWindowRegister", *where, byref(self.window), SYMMETRIC)
        if not self.attempt("window_register", lambda: self.abi(*window)):
            self.abi(*window)

    def open(self, name: str) -> None:
        meeting = self.share(name, lambda: unique_id(self.abi))
        self.abi("ncclCommInitRank", byref(self.base), 2, meeting, self.rank)

    def collect(self) -> None:
        where = (self.base, self.stream)
        result = c_void_p((self.memory.value or 0) + NBYTES // 2)
        memory = (self.memory, result, 1, INT32)
        for operation, (name, arguments) in COLLECTIVES.items():
            self.attempt(
                operation, lambda c=(name, *memory, *arguments, *where): self.abi(*c)
            )
        message = (self.memory, 1, INT32, self.peer, *where)
        calls = [("send", "ncclSend"), ("recv", "ncclRecv")]
        for operation, name in calls if self.rank == 0 else calls[::-1]:
            self.attempt(operation, lambda name=name: self.abi(name, *message))

    def put(self) -> None:
        where = (self.base, self.stream)
        self.attempt("put", lambda: self.put_to(self.peer))
        self.attempt(
            "signal", lambda: self.abi("ncclSignal", self.peer, 0, 0, 0, *where)
        )
        description = WaitDescription(2, self.peer, 0, 0)
        self.attempt(
            "wait", lambda: self.abi("ncclWaitSignal", 1, byref(description), *where)
        )

    def put_to(self, peer: int) -> None:
        target = (UINT8, peer, self.window, 64, 0, 0, 0)
        self.abi("ncclPutSignal", self.memory, 8, *target, self.base, self.stream)

    def relate(self) -> None:
        """Make communicators of the first one, and end them."""
        split, shrunk, grown = c_void_p(), c_void_p(), c_void_p()
        self.attempt(
            "split",
            lambda: self.abi("ncclCommSplit", self.base, 0, 0, byref(split), None),
        )
        if not split:
            self.abi("ncclCommSplit", self.base, 0, 0, byref(split), None)
        others = (c_int * 1)(self.peer)
        shrink = ("ncclCommShrink", self.base, others, 1, byref(shrunk), None, 0)
        if not self.attempt("shrink", lambda: self.abi(*shrink)):
            self.abi(*shrink)
        if self.attempt("grow", lambda: self.grow(shrunk, grown)):
            self.abi("ncclCommDestroy", grown)
        self.attempt("revoke", lambda: self.abi("ncclCommRevoke", split, 0))
        if not self.attempt("abort", lambda: self.abi("ncclCommAbort", split)):
            self.abi("ncclCommAbort", split)
        self.abi("ncclCommDestroy", shrunk)

    def grow(self, shrunk: c_void_p, grown: c_void_p) -> None:
        """Let rank 1 join the communicator that rank 0 has for itself."""

        def make() -> bytes:
            made = UniqueId()
            self.abi("ncclCommGetUniqueId", shrunk, byref(made))
            return bytes(made.internal)

        meeting = self.share("grow", make)
        old = self.rank == 0
        self.abi(
            "ncclCommGrow",
            *(shrunk if old else None, 2, byref(meeting), -1 if old else 1),
            *(byref(grown), None),
        )

    def end(self) -> None:
        self.abi("ncclCommWindowDeregister", self.base, self.window)
        self.attempt("finalize", lambda: self.abi("ncclCommFinalize", self.base))
        if not self.attempt("destroy", lambda: self.abi("ncclCommDestroy", self.base)):
            self.abi("ncclCommDestroy", self.base)
        self.abi("ncclMemFree", self.memory)


def walk() -> dict[str, list[int]]:
    walked = Walk()
    walked.go()
    return walked.codes


def timed_walk() -> dict[str, list[float]]:
    walked = Walk()
    walked.go()
    return walked.seconds
