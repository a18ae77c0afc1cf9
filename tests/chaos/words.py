"""What ranks tell the test: how calls ended, what is held, what is open."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import weightsync

if TYPE_CHECKING:
    from collections.abc import Awaitable

OPEN_SECONDS = 15.0
"""Timeout of opening: longer than anything that a scenario does to the others."""

CLOSE_SECONDS = 3.0
"""What "a few seconds at most" means for a close, before the grace."""

GRACE = 3.0
"""How much longer than its timeout a call may take."""


class ChaosError(AssertionError):
    """Something that must not happen has happened."""


class Call(NamedTuple):
    """How a call of a rank ended: "ok" or the class of the error.

    ``version`` and ``report`` are what a receive and a push gave, also by their error;
    ``wrong`` are names of tensors whose bytes are not those of the version.
    """

    name: str
    kind: str
    text: str
    seconds: float
    limit: float
    version: int | None = None
    report: weightsync.PushReport | None = None
    wrong: tuple[str, ...] = ()


class Doing(NamedTuple):
    """A rank is about to make a call."""

    name: str


class Held(NamedTuple):
    """What a generator rank holds at its end, or why that cannot be read."""

    version: int | None
    wrong: tuple[str, ...]
    unreadable: str


class Torn(NamedTuple):
    """A reader saw what it must not see."""

    version: int | None
    wrong: tuple[str, ...]


class Census(NamedTuple):
    """What a process has open; ``keys`` of the store, where it was asked for."""

    descriptors: int
    threads: int
    segments: int
    keys: tuple[str, ...] = ()


class Replicas(NamedTuple):
    """Who is in the pool, as a trainer rank knows it."""

    names: tuple[str, ...]


def census(keys: tuple[str, ...] = ()) -> Census:
    """Count descriptors, threads and mapped memory of ranks in this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return Census(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        maps.count("memfd:weightsync "),
        keys,
    )


async def timed(name: str, limit: float, call: Awaitable[Any]) -> tuple[Call, Any]:
    """Await a call; return how it ended, and its value."""
    started = time.monotonic()
    try:
        value = await call
    except weightsync.WeightSyncError as error:
        seconds = time.monotonic() - started
        report = getattr(error, "report", None)
        kind = type(error).__name__
        return Call(name, kind, str(error), seconds, limit, report=report), None
    return Call(name, "ok", "", time.monotonic() - started, limit), value
