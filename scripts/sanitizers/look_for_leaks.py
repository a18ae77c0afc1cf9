"""Looks for leaks when an interpreter ends: all of scripts/sanitize import this.

Not when the process ends, as LeakSanitizer does by itself: by then Python has let go of
what it will never free, and ranks on the emulator end without that.
"""

from __future__ import annotations

import atexit
import ctypes


def look_for_leaks() -> None:
    """Report what nobody refers to."""
    look = getattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check", None)
    if look is not None:
        look()


# The first to be registered is the last to be called, also in ranks.
atexit.register(look_for_leaks)
