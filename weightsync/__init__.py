"""weightsync moves the weights of a model from trainers to generators, one-sidedly."""

from __future__ import annotations

from weightsync import blocking
from weightsync.errors import (
    ClosedError,
    DtypeError,
    EpochError,
    PeerError,
    PlanError,
    ProtocolError,
    TimedOutError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.layout import Shard
from weightsync.lease import Lease, Weights
from weightsync.stats import PushReport, ReplicaReport, Update
from weightsync.transport import Generator, Trainer
from weightsync.window import Operation, Window

__all__ = [
    "ClosedError",
    "DtypeError",
    "EpochError",
    "Generator",
    "Lease",
    "Operation",
    "PeerError",
    "PlanError",
    "ProtocolError",
    "PushReport",
    "ReplicaReport",
    "Shard",
    "TimedOutError",
    "Trainer",
    "UnsupportedError",
    "Update",
    "WeightSyncError",
    "Weights",
    "Window",
    "blocking",
]
