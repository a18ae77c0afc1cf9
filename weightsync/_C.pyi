"""Types of the compiled core (csrc/module.cpp)."""

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Backend, Store, Window, Work

TORCH_VERSION: str

class WorkShm(Work):
    def fileno(self) -> int: ...
    def abort(self) -> None: ...

class WindowShm(Window):
    def put_many(
        self,
        tensors: Sequence[Tensor],
        runs: Tensor,
        dst_rank: int,
        signals: int,
        async_op: bool,
    ) -> WorkShm: ...
    def wait_signals(
        self,
        peers: Sequence[int],
        counts: Sequence[int],
        timeout: timedelta,
        async_op: bool,
    ) -> WorkShm: ...
    def copy_local(
        self,
        tensors: Sequence[Tensor],
        runs: Tensor,
        to_window: bool,
        async_op: bool,
    ) -> WorkShm: ...
    def available_signals(self, peer_rank: int) -> int: ...
    def connect(self, peers: Sequence[int]) -> None: ...
    def prepare(self, runs: Tensor, dst: int) -> None: ...
    def peer_nbytes(self, peer_rank: int) -> int: ...

class ProcessGroupShm(Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        enable_reconfigure: bool,
    ) -> None: ...

def describe(tensors: Sequence[Tensor]) -> bytes: ...
def repoint(
    tensors: Sequence[Tensor], memory: Tensor, offsets: Sequence[int]
) -> None: ...
def first_unwritable(tensors: Sequence[Tensor]) -> int: ...
