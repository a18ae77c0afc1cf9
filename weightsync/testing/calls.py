"""How often this process called each function of CUDA and NCCL, on the emulator."""

from __future__ import annotations

import ctypes

from weightsync.errors import UnsupportedError


def calls() -> dict[str, int]:
    """Return the number of calls of each function until now, by name.

    Those of CUDA's runtime, of NCCL, and of the driver's functions for kernels; from
    all threads, and also those that failed. A function that was never called is not
    there. A launch of a kernel is ``"a launch"`` or has a name with ``Launch``.

    Raises:
        UnsupportedError: this process does not run on the emulator.
    """
    process = ctypes.CDLL(None)
    if not hasattr(process, "weightsync_emulator_calls"):
        raise UnsupportedError("calls are counted on the emulator only")
    process.weightsync_emulator_calls.restype = ctypes.c_char_p
    text: bytes = process.weightsync_emulator_calls()
    lines = [line.rpartition(" ") for line in text.decode().splitlines()]
    return {name: int(count) for name, _, count in lines}
