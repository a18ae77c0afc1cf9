"""Tests of programs for GPUs on machines without one: ranks on emulated GPUs."""

from __future__ import annotations

from weightsync.testing.calls import calls
from weightsync.testing.environment import available, environment, reason
from weightsync.testing.injection import inject
from weightsync.testing.marker import requires_emulator
from weightsync.testing.outcome import Outcome, RanksFailedError
from weightsync.testing.ranks import emulated, outcomes

__all__ = [
    "Outcome",
    "RanksFailedError",
    "available",
    "calls",
    "emulated",
    "environment",
    "inject",
    "outcomes",
    "reason",
    "requires_emulator",
]
