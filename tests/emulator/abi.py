"""The emulated libraries by ctypes, for tests: what the benchmark has no use for."""

from __future__ import annotations

from ctypes import POINTER, c_int, c_size_t, c_void_p

from weightsync.bench.emulator_abi import FUNCTIONS, HANDLE, Abi, UniqueId

# Buffers, a count and a type; then what differs; then communicator and stream.
_MOVED = (c_void_p, c_void_p, c_size_t, c_int)
_WHERE = (c_void_p, c_void_p)

MORE = {
    "cudaMalloc": (HANDLE, c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "ncclCommInitAll": (HANDLE, c_int, POINTER(c_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclReduce": (*_MOVED, c_int, c_int, *_WHERE),
    "ncclBroadcast": (*_MOVED, c_int, *_WHERE),
    "ncclAllGather": (*_MOVED, *_WHERE),
    "ncclReduceScatter": (*_MOVED, c_int, *_WHERE),
    "ncclAlltoAll": (*_MOVED, *_WHERE),
    "ncclGather": (*_MOVED, c_int, *_WHERE),
    "ncclScatter": (*_MOVED, c_int, *_WHERE),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, *_WHERE),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, *_WHERE),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, HANDLE),
    "ncclCommDeregister": (c_void_p, c_void_p),
    "ncclCommSplit": (c_void_p, c_int, c_int, HANDLE, c_void_p),
    "ncclCommShrink": (c_void_p, POINTER(c_int), c_int, HANDLE, c_void_p, c_int),
    "ncclCommGetUniqueId": (c_void_p, POINTER(UniqueId)),
    "ncclCommGrow": (*(c_void_p, c_int, POINTER(UniqueId), c_int, HANDLE, c_void_p),),
    "ncclCommRevoke": (c_void_p, c_int),
    "ncclCommAbort": (c_void_p,),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
}


def everything() -> Abi:
    """All functions that a test may call."""
    return Abi({**FUNCTIONS, **MORE})
