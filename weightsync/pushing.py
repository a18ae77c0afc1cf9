"""One push as a trainer rank sees it: how it was called, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, SupportsIndex

import anyio

from weightsync.errors import PlanError
from weightsync.messages import Fault, OnBusy, PushEnded, Require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightsync.layout import Captured


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What a push is called with. Raises PlanError for what is no option of it."""

    version: int | None
    partial: bool
    on_busy: OnBusy
    require: Require
    timeout: float
    ignore: Sequence[str]

    def __post_init__(self) -> None:
        """Check, and make the version an int of Python's own."""
        _check_choice("on_busy", self.on_busy, ("wait", "skip"))
        _check_choice("require", self.require, ("any", "all"))
        object.__setattr__(self, "version", _integer(self.version))


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise PlanError(f"{name} is {' or '.join(map(repr, known))}, not {value!r}")


def _integer(version: object) -> int | None:
    if version is None:
        return None
    number = version.__index__() if isinstance(version, SupportsIndex) else -1
    if isinstance(version, bool) or not 0 < number < 2**62:
        raise PlanError(f"a version is an integer from 1 to 2**62, not {version!r}")
    return number


class Push:
    """The push under way on this rank."""

    def __init__(self, number: int, captured: Captured | Fault) -> None:
        self.number: Final = number
        self.captured: Final = captured
        self.puts = 0
        self.ended = anyio.Event()
        self.outcome: PushEnded | None = None
        self.idle = anyio.Event()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What is put."""
        return () if isinstance(self.captured, Fault) else self.captured.tensors

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """The same by name."""
        if isinstance(self.captured, Fault):
            return {}
        names = self.captured.manifest.names
        return dict(zip(names, self.captured.tensors, strict=True))
