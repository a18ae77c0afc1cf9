"""What messages say of engines, and the one that shared memory does without.

No wait for signals may be issued to NCCL that a death leaves unsatisfied. So the
leader tells when everything is put, and only then do generator ranks wait.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MAX_SOURCES: Final = 1 << 16
"""Limit of allocations of its own that a trainer rank puts straight from."""

EngineName = Literal["shm", "nccl", "torch-nccl2"]
Slots = Literal["staged", "swap", "inplace"]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Sources = Annotated[int, Meta(ge=0, le=MAX_SOURCES)]


class AllPut(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Leader to a replica: all is put, so a wait for these signals is satisfied.

    ``signals[g][t]`` were sent by trainer rank t to rank g.
    """

    sequence: Count
    signals: tuple[tuple[Count, ...], ...]
