"""The message of engine "nccl" that shared memory does without, and the engines' names.

No wait for signals may be issued to NCCL that a death leaves unsatisfied. So the
leader tells when everything is put, and only then do generator ranks wait.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

EngineName = Literal["shm", "nccl", "torch-nccl2"]

_Count = Annotated[int, Meta(ge=0, le=2**62)]


class AllPut(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Leader to a replica: all is put, so a wait for these signals is satisfied.

    ``signals[g][t]`` were sent by trainer rank t to rank g.
    """

    sequence: _Count
    signals: tuple[tuple[_Count, ...], ...]
