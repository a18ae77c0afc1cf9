"""Types of the compiled core (csrc/module.cpp)."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, device
from torch._C._distributed_c10d import Backend, Store, Window, Work

TORCH_VERSION: str

class WorkShm(Work):
    can_be_given_up: bool
    def fileno(self) -> int: ...
    def abort(self) -> None: ...

class WorkNccl(Work):
    def fileno(self) -> int: ...

class Bell:
    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def ring_after(self, stream: int, device: int) -> None: ...

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

class WindowNccl(Window):
    def put_many(
        self,
        tensors: Sequence[Tensor],
        runs: Tensor,
        dst_rank: int,
        signals: int,
        async_op: bool,
    ) -> Work: ...
    def wait_signals(
        self,
        peers: Sequence[int],
        counts: Sequence[int],
        timeout: timedelta,
        async_op: bool,
    ) -> Work: ...
    def copy_local(
        self,
        tensors: Sequence[Tensor],
        runs: Tensor,
        to_window: bool,
        async_op: bool,
    ) -> Work: ...
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

class NcclConfig:
    cga_cluster_size: int | None
    min_ctas: int | None
    max_ctas: int | None
    cta_policy: int | None
    split_share: int | None
    shrink_share: int | None
    traffic_class: int | None
    collnet_enable: int | None
    nvls_ctas: int | None
    n_channels_per_net_peer: int | None
    nvlink_centric_sched: int | None
    net_name: str
    comm_name: str
    def __init__(self) -> None: ...

class NcclOptions(Backend.Options):
    config: NcclConfig
    is_high_priority_stream: bool
    blocking_wait: bool
    library: str
    group_desc: str
    trace_prefix: str
    enable_reconfigure: bool
    def __init__(self, timeout: timedelta = ...) -> None: ...
    def clone(self) -> NcclOptions: ...

class ProcessGroupNccl(Backend):
    def __init__(
        self, store: Store, rank: int, size: int, options: NcclOptions
    ) -> None: ...
    @property
    def mem_allocator(self) -> Any: ...
    @property
    def nccl_version(self) -> str: ...
    @property
    def nccl_library(self) -> str: ...
    @property
    def quarantined(self) -> bool: ...
    def split(
        self, store: Store, ranks: Sequence[int], options: NcclOptions
    ) -> ProcessGroupNccl | None: ...
    def perform_nocolor_split(self, device: device | None) -> None: ...

def map_again(tensor: Tensor) -> Tensor: ...
def nccl_allocator() -> Any: ...
def nccl_allocation(tensor: Tensor) -> tuple[int, int] | None: ...

class PinnedMemory:
    def __init__(self, memory: Tensor) -> None: ...
    def copy_in(self, tensors: Sequence[Tensor], runs: Tensor) -> None: ...
    def close(self) -> None: ...

def find_nccl(library: str = "") -> tuple[str, str]: ...
def trace_json(reason: str) -> str: ...
def dump_trace(prefix: str, reason: str) -> tuple[str, str]: ...
def copy_into(memory: Tensor, tensors: Sequence[Tensor], runs: Tensor) -> None: ...
def describe(tensors: Sequence[Tensor]) -> bytes: ...
def repoint(
    tensors: Sequence[Tensor], memory: Sequence[Tensor], offsets: Sequence[int]
) -> None: ...
def first_unwritable(tensors: Sequence[Tensor]) -> int: ...
