"""The emulated CUDA and NCCL as C programs call them: the functions, and a rank."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from typing import TYPE_CHECKING, Any, Final

from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UINT8: Final = 1
INT32: Final = 2
SUM: Final = 0
SYMMETRIC: Final = 1
"""Codes of nccl.h: two types, a reduction, the flag of a window for puts."""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: what the ranks of a new communicator have in common."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class WaitDescription(ctypes.Structure):
    """``ncclWaitSignalDesc_t``: how many signals of whom to wait for."""

    _fields_ = (
        ("opCnt", c_int),
        ("peer", c_int),
        ("sigIdx", c_int),
        ("ctx", c_int),
    )


HANDLE: Final = POINTER(c_void_p)
"""The type of an argument that a handle or an address is written to."""

FUNCTIONS: Final[Mapping[str, Sequence[Any]]] = {
    "cudaSetDevice": (c_int,),
    "cudaStreamCreate": (HANDLE,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamDestroy": (c_void_p,),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (HANDLE, c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclMemAlloc": (HANDLE, c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclCommWindowRegister": (c_void_p, c_void_p, c_size_t, HANDLE, c_int),
    "ncclCommWindowDeregister": (c_void_p, c_void_p),
    "ncclAllReduce": (*(c_void_p,) * 2, c_size_t, c_int, c_int, *(c_void_p,) * 2),
    "ncclPutSignal": (
        *(c_void_p, c_size_t, c_int, c_int, c_void_p, c_size_t),
        *(c_int, c_int, c_uint, c_void_p, c_void_p),
    ),
    "ncclSignal": (c_int, c_int, c_int, c_uint, c_void_p, c_void_p),
    "ncclWaitSignal": (c_int, POINTER(WaitDescription), c_void_p, c_void_p),
}


class CallError(WeightSyncError):
    """A function of CUDA or NCCL returned something but success; ``code`` is that."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code: Final = code


class Abi:
    """Functions, by their names in C; each raises CallError for its code."""

    def __init__(self, functions: Mapping[str, Sequence[Any]] = FUNCTIONS) -> None:
        """Find them, with the types of their arguments, in the preloaded libraries."""
        self._library: Final = ctypes.CDLL(None)
        for name, types in functions.items():
            function = getattr(self._library, name)
            function.argtypes = types
            function.restype = c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call one of them."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CallError(name, code)


class Rank:
    """A rank on the device of its number: its stream, and memory that is a window."""

    def __init__(self, abi: Abi, rank: int, ranks: int, unique_id: bytes) -> None:
        """Meet the other ranks; all must be given what ``unique_id`` returned to one.

        Raises CallError.
        """
        self._abi: Final = abi
        self.communicator: Final = c_void_p()
        self.stream: Final = c_void_p()
        self.memory: Final = c_void_p()
        self.window: Final = c_void_p()
        self.rank: Final = rank
        abi("cudaSetDevice", rank)
        abi("cudaStreamCreate", byref(self.stream))
        meeting = UniqueId.from_buffer_copy(unique_id)
        abi("ncclCommInitRank", byref(self.communicator), ranks, meeting, rank)

    def register(self, nbytes: int) -> int:
        """Allocate a window, together with the other ranks; return its address."""
        self._abi("ncclMemAlloc", byref(self.memory), nbytes)
        self._abi(
            "ncclCommWindowRegister",
            *(self.communicator, self.memory, nbytes),
            *(byref(self.window), SYMMETRIC),
        )
        return self.memory.value or 0

    def all_reduce(self) -> None:
        """Add up the first four bytes of the windows in place; wait for it."""
        self._abi(
            "ncclAllReduce",
            *(self.memory, self.memory, 1, INT32, SUM),
            *(self.communicator, self.stream),
        )
        self.synchronize()

    def put(self, peer: int, nbytes: int) -> None:
        """Put so many first bytes of the window to a peer's second half; wait."""
        self._abi(
            "ncclPutSignal",
            *(self.memory, nbytes, UINT8, peer, self.window, nbytes, 0, 0, 0),
            *(self.communicator, self.stream),
        )
        self.synchronize()

    def signal(self, peer: int) -> None:
        """Send a signal; wait until it is sent."""
        self._abi("ncclSignal", peer, 0, 0, 0, self.communicator, self.stream)
        self.synchronize()

    def wait(self, peer: int) -> None:
        """Wait for one signal of a peer."""
        description = WaitDescription(1, peer, 0, 0)
        self._abi(
            "ncclWaitSignal",
            *(1, byref(description), self.communicator, self.stream),
        )
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for everything in the stream."""
        self._abi("cudaStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give everything back, together with the other ranks."""
        self._abi("ncclCommWindowDeregister", self.communicator, self.window)
        self._abi("ncclCommDestroy", self.communicator)
        self._abi("ncclMemFree", self.memory)
        self._abi("cudaStreamDestroy", self.stream)


def unique_id(abi: Abi) -> bytes:
    """Return what the ranks of one new communicator are to be given."""
    made = UniqueId()
    abi("ncclGetUniqueId", byref(made))
    return bytes(made.internal)
