"""weightsync moves the weights of a model from trainers to generators, one-sidedly.

Importing it imports nothing else: each name comes from its module when it is first
used, so that what needs no torch, such as ``weightsync emulate``, does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from weightsync import blocking
    from weightsync.errors import (
        ClosedError,
        DtypeError,
        EpochError,
        FencedError,
        PeerError,
        PlanError,
        ProtocolError,
        TimedOutError,
        UnsupportedError,
        WeightSyncError,
    )
    from weightsync.layout import Shard
    from weightsync.lease import Lease, Weights
    from weightsync.membership import (
        LastPush,
        Membership,
        MembershipEvent,
        Proposal,
        ReplicaMember,
        TrainerMember,
    )
    from weightsync.observer import Observer
    from weightsync.operation import Operation
    from weightsync.stats import PushReport, ReplicaReport, Update
    from weightsync.straight import nccl_memory
    from weightsync.transport import Generator, Trainer
    from weightsync.window import Window

__all__ = [
    "ClosedError",
    "DtypeError",
    "EpochError",
    "FencedError",
    "Generator",
    "LastPush",
    "Lease",
    "Membership",
    "MembershipEvent",
    "Observer",
    "Operation",
    "PeerError",
    "PlanError",
    "Proposal",
    "ProtocolError",
    "PushReport",
    "ReplicaMember",
    "ReplicaReport",
    "Shard",
    "TimedOutError",
    "Trainer",
    "TrainerMember",
    "UnsupportedError",
    "Update",
    "WeightSyncError",
    "Weights",
    "Window",
    "blocking",
    "nccl_memory",
]

# Where the names are that are not of weightsync.errors.
_HOMES: Final = {
    "Generator": "transport",
    "LastPush": "membership",
    "Lease": "lease",
    "Membership": "membership",
    "MembershipEvent": "membership",
    "Observer": "observer",
    "Operation": "operation",
    "Proposal": "membership",
    "PushReport": "stats",
    "ReplicaMember": "membership",
    "ReplicaReport": "stats",
    "Shard": "layout",
    "Trainer": "transport",
    "TrainerMember": "membership",
    "Update": "stats",
    "Weights": "lease",
    "Window": "window",
    "nccl_memory": "straight",
}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "blocking":
        return importlib.import_module("weightsync.blocking")
    home = importlib.import_module(f"weightsync.{_HOMES.get(name, 'errors')}")
    found = getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names too that nobody used yet."""
    return sorted({*globals(), *__all__})
