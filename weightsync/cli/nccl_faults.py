"""What is known to be wrong with the versions of NCCL that weightsync takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OLDEST: Final = (2, 29, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them, from a version on until another one that repaired it.

    ``issue`` is its number in NVIDIA/nccl, if it has one. ``avoided`` says why links of
    weightsync do not meet it; empty where they may.
    """

    text: str
    fixed: tuple[int, int, int] | None
    issue: int | None = None
    since: tuple[int, int, int] = OLDEST
    avoided: str = ""

    def concerns(self, version: tuple[int, int, int]) -> bool:
        """Whether a version has it."""
        return self.since <= version and (self.fixed is None or version < self.fixed)


FAULTS: Final = (
    Fault(
        "across hosts a put into a window that does not begin where its allocation "
        "does goes to a wrong place",
        fixed=(2, 31, 2),
        issue=2198,
        avoided="windows are whole allocations",
    ),
    Fault(
        "the memory that counts signals is not set to zero",
        fixed=(2, 31, 2),
        avoided="a wait begins when all is put, and what was put is checked after it",
    ),
    Fault(
        "the first one-sided call of a communicator blocks until every rank makes one",
        fixed=(2, 31, 0),
        avoided="all ranks of a link make it when the link forms",
    ),
    Fault(
        "more than 256 puts under way to a peer on another host may be lost",
        fixed=(2, 30, 7),
        issue=2119,
    ),
    Fault(
        "all ranks have to open a window with the same size",
        fixed=(2, 30, 7),
        avoided="a link of other sizes is refused, with an error that names them",
    ),
    Fault(
        "one-sided calls cannot be captured in a CUDA graph",
        fixed=(2, 30, 3),
        avoided="none is captured",
    ),
    Fault(
        "a driver older than 12.5, which lacks what one-sided calls need, is not "
        "refused",
        fixed=(2, 30, 3),
    ),
    Fault(
        "a window without the flag of symmetric memory may be registered with success "
        "and be none",
        fixed=(2, 29, 7),
        issue=1963,
        avoided="windows have the flag, and one that is none is an error",
    ),
    Fault(
        "neither abort nor revoke ends a wait for a signal that does not come, and the "
        "death of a peer is reported to nobody",
        fixed=None,
        avoided="no wait begins before its signals are known to be sent",
    ),
    Fault(
        "a put through a network to a rank that died never completes, and then an "
        "abort does not return; weightsync sets such a link apart (docs/gpu.md)",
        fixed=None,
    ),
)


def parse_version(text: str) -> tuple[int, int, int]:
    """Return ``(2, 30, 7)`` for ``2.30.7``."""
    major, minor, patch = map(int, text.split("."))
    return major, minor, patch


def faults_of(version: str) -> list[Fault]:
    """Return those that a version has."""
    return [fault for fault in FAULTS if fault.concerns(parse_version(version))]
