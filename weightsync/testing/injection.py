"""Faults that begin while a process runs, on the emulator."""

from __future__ import annotations

import ctypes
import os

from weightsync.errors import UnsupportedError


def inject(faults: str) -> None:
    """Let calls of this process go wrong from now on.

    ``faults`` has entries like the variable ``WEIGHTSYNC_EMULATOR_FAULTS``, but no
    settings. They take the place of all entries before, and occurrences are counted
    from now on; with ``""`` nothing goes wrong any more.

    Raises:
        UnsupportedError: this process does not run on the emulator.
        ValueError: the text cannot be read; the message says what is wrong.
    """
    if not hasattr(ctypes.CDLL(None), "weightsync_emulator_calls"):
        raise UnsupportedError("faults are injected on the emulator only")
    library = ctypes.CDLL(os.environ["WEIGHTSYNC_NCCL_LIBRARY"])
    library.weightsync_emulator_inject_faults.restype = ctypes.c_char_p
    refusal = library.weightsync_emulator_inject_faults(faults.encode())
    if refusal is not None:
        raise ValueError(refusal.decode())
