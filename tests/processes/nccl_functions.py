"""The functions of CUDA and NCCL that a pool calls, and which of them tests let fail.

By what happens when, and in which process: which calls of a function fail, one in each
case, counted from the beginning of the phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from tests.processes.nccl_cases import NCCLS, USUAL, Case

Calls: TypeAlias = Mapping[str, tuple[int, ...]]
Table: TypeAlias = Mapping[str, Calls]

FORMING: Final[Table] = {
    "leader": {"ncclGetUniqueId": (1,)},
    "trainer": {
        "cudaMemcpyAsync": (1, 4),
        "cudaSetDevice": (1, 2, 5),
        "cudaStreamCreateWithPriority": (1, 2),
        "cudaStreamSynchronize": (1, 4),
    },
    "generator": {
        "cudaMemcpyAsync": (1, 4),
        "cudaSetDevice": (3, 5),
        "cudaStreamCreateWithPriority": (129, 130),
        "cudaStreamSynchronize": (2, 5),
    },
}
"""While a later link forms: the replica is removed, and comes back."""

FIRST: Final[Table] = {
    "trainer": {"cudaHostAlloc": (1,), "cudaMemsetAsync": (1,), "ncclGetVersion": (1,)}
}
"""The same for the first link of a trainer rank, which makes what all links share."""

OPENING: Final[Table] = {
    "generator": {
        "cudaMemsetAsync": (1,),
        "cudaStreamCreateWithPriority": (1,),
        "ncclGetVersion": (1,),
    }
}
"""Where a generator begins: it says so there."""

UNNOTICED_FORMING: Final[Table] = {
    "trainer": {"cudaThreadExchangeStreamCaptureMode": (1,)},
    "generator": {
        "cudaEventCreateWithFlags": (1,),
        "cudaEventRecordWithFlags": (1,),
        "cudaStreamIsCapturing": (1,),
        "cudaThreadExchangeStreamCaptureMode": (1,),
    },
}
"""The link forms all the same: nothing is captured, and ``receive`` notes again."""

SPOILING: Final[Table] = {
    "trainer": {
        "cudaEventRecordWithFlags": (2, 7, 13),
        "cudaLaunchHostFunc": (1, 2),
        "cudaMemcpyAsync": (1, 3, 6),
        "cudaSetDevice": (3,),
        "cudaStreamIsCapturing": (8,),
        "cudaStreamWaitEvent": (2, 3),
        "ncclGroupEnd": (1, 8),
        "ncclGroupStart": (1, 8),
    },
    "generator": {
        "cudaEventQuery": (1,),
        "cudaEventRecordWithFlags": (2, 3),
        "cudaLaunchHostFunc": (1, 2),
        "cudaMemcpyAsync": (1,),
        "cudaSetDevice": (1, 5),
        "cudaStreamIsCapturing": (2,),
        "cudaStreamSynchronize": (1,),
        "cudaStreamWaitEvent": (1,),
    },
}
"""In a push: one replica fails, and comes back."""

REFUSING: Final[Table] = {
    "trainer": {
        "cudaEventCreateWithFlags": (1,),
        "cudaEventRecordWithFlags": (1,),
        "cudaSetDevice": (1,),
        "cudaStreamIsCapturing": (1,),
        "cudaStreamSynchronize": (1,),
        "cudaStreamWaitEvent": (1,),
    }
}
"""Before anything is put: every rank's push fails, and no replica is removed."""

SWITCHING: Final[Table] = {
    "generator": {
        "cudaEventCreateWithFlags": (1,),
        "cudaEventRecordWithFlags": (1,),
        "cudaMemcpyAsync": (2,),
        "cudaStreamIsCapturing": (1,),
        "cudaStreamSynchronize": (2,),
        "cudaStreamWaitEvent": (2,),
    }
}
"""When a version is there already: it is delivered, and ``receive`` fails."""

ASKING: Final[Table] = {
    "trainer": {"ncclCommGetAsyncError": (1,)},
    "generator": {"ncclCommGetAsyncError": (1,)},
}
"""Between two pushes: the next one fails for that replica, which comes back."""

EITHER: Final[Table] = {
    "trainer": {"cudaEventDestroy": (1,), "cudaEventQuery": (1, 5)},
    "generator": {"cudaEventDestroy": (1,)},
}
"""It depends on who asks at that moment whether a replica fails, or nothing."""

LEAVING: Final[Table] = {
    "trainer": {"cudaSetDevice": (1,), "ncclCommAbort": (1,)},
    "generator": {
        "cudaDeviceSynchronize": (1,),
        "cudaSetDevice": (1, 2),
        "ncclCommAbort": (1,),
        "ncclMemFree": (1,),
    },
}
"""When a replica leaves: it does, and everything goes on."""

IN_ONE_PROCESS: Final = (
    "cuMemRetainAllocationHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cudaMemcpy2DAsync",
)
"""For windows of several segments, and for shards that do not lie together."""

BY_OPERATION: Final = {
    "ncclAllGather": "all_gather",
    "ncclCommAbort": "abort",
    "ncclCommInitRankConfig": "init",
    "ncclCommWindowRegister": "window_register",
    "ncclMemAlloc": "mem_alloc",
    "ncclPutSignal": "put",
    "ncclSignal": "signal",
    "ncclWaitSignal": "wait",
}
"""Those that ``test_engine_nccl_matrix`` and its neighbour let fail, and how."""

NOT: Final = {
    "cuMemRelease": "nothing is lost but a handle",
    "cuMemUnmap": "as a process ends or after another failure; memory stays mapped",
    "cuMemAddressFree": "likewise; an address stays reserved",
    "a call before": "cudaGetLastError: it tells of another call",
    "cudaGetDevice": "reads a variable of the thread",
    "cudaGetDriverEntryPointByVersion": "without the functions there are no segments",
    "cudaMalloc": "memory of torch, for the caller's own tensors",
    "cudaDeviceGetStreamPriorityRange": "torch asks once in a process, for its streams",
    "cudaGetDeviceCount": "torch asks once in a process, whether there is a GPU",
    "cudaGetDeviceProperties": "torch asks once in a process, what the GPUs are",
    "cudaStreamGetCaptureInfo": "torch asks once in a process, for its streams",
}
"""Functions that are called and let fail nowhere, and why."""


def cases(table: Table) -> list[Case]:
    """Return a case for each call of a table that fails; of NCCL, for each version."""
    return [
        Case(who, f"{name}@n={number}:fail={code}", version)
        for who, calls in table.items()
        for name, numbers in calls.items()
        for code, versions in [(3, NCCLS) if name[:4] == "nccl" else (999, (USUAL,))]
        for number in numbers
        for version in versions
    ]


def covered(who: Sequence[str], *tables: Table) -> set[str]:
    """Return the functions that fail in these processes in cases of these tables."""
    named = {name for table in tables for each in who for name in table.get(each, {})}
    return named | set(BY_OPERATION) | set(NOT)
