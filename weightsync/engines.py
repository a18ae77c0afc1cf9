"""Which engine is used: chosen from the device of the tensors, one for all of a job."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final

import torch

from weightsync.engine import ShmEngine
from weightsync.engine_nccl import NcclEngine
from weightsync.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from weightsync.announcing import EngineName
    from weightsync.engine import Engine
    from weightsync.replica import Replica

_DEVICES: Final[Mapping[str, str]] = {"shm": "cpu", "nccl": "cuda"}
_KINDS: Final[Mapping[str, EngineName]] = {"cpu": "shm", "cuda": "nccl"}


def checked(engine: str | None) -> EngineName | None:
    """Return an engine's name; PlanError for what is none."""
    if engine is None:
        return None
    if engine not in _DEVICES:
        known = " or ".join(map(repr, _DEVICES))
        raise PlanError(f"engine is {known} or None, not {engine!r}")
    return _KINDS[_DEVICES[engine]]


def device_of(
    tensors: Sequence[torch.Tensor], labels: Sequence[str], engine: EngineName | None
) -> torch.device:
    """Return the device that all tensors are on.

    Raises PlanError for several devices, and for one that is not the engine's.
    """
    first: torch.device | None = None
    for tensor, label in zip(tensors, labels, strict=True):
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            message = f"{labels[0]} is on {first}, and {label} on {tensor.device}"
            raise PlanError(f"all tensors must be on one device: {message}")
    device = torch.device(_DEVICES[engine or "shm"]) if first is None else first
    if engine is not None and device.type != _DEVICES[engine]:
        message = f"needs tensors on {_DEVICES[engine]}; {labels[0]} is on {device}"
        raise PlanError(f"engine {engine!r} {message}")
    return device


def engine_on(device: torch.device) -> Engine:
    """Make the engine of a device."""
    return ShmEngine() if device.type == "cpu" else NcclEngine(device)


def _current_device() -> torch.device | None:
    """Return the GPU that this thread has chosen; does not begin to use it."""
    compiled = torch._C  # pyright: ignore[reportPrivateUsage] # no other
    current: Callable[[], int] | None = getattr(compiled, "_cuda_getDevice", None)
    with suppress(RuntimeError):  # where there is no GPU
        return None if current is None else torch.device("cuda", current())
    return None


class Engines:
    """The engine of a trainer rank: as it was told, or as the first replica has it.

    On a GPU it is the device that is current where the trainer is made.
    """

    def __init__(self, name: EngineName | None) -> None:
        self.name: Final = name
        self._lock: Final = threading.Lock()
        self._engine: Engine | None = None
        if name == "nccl" and not torch.cuda.is_available():
            raise UnsupportedError("engine 'nccl' needs a GPU, and there is none")
        self._device: Final = None if name == "shm" else _current_device()

    def get(self, name: EngineName) -> Engine:
        """Return the engine of this name. Raises PlanError, UnsupportedError."""
        with self._lock:
            if self._engine is None or self._engine.name != name:
                self._engine = (
                    ShmEngine() if name == "shm" else NcclEngine(self._device)
                )
            return self._engine

    def mark(self) -> object:
        """Return what the caller gave the device to do until now."""
        return None if self._engine is None else self._engine.mark()

    def ordered(self, after: object) -> AbstractContextManager[None]:
        """Let this thread work on the device, after a mark."""
        engine = None if after is None else self._engine
        return nullcontext() if engine is None else engine.ordered(after)

    def check(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Raise PlanError for tensors that the engine in use cannot put."""
        if self._engine is None or not tensors:
            return
        wanted = self._engine.device
        for tensor, name in zip(tensors, names, strict=True):
            if tensor.device != wanted:
                message = (
                    f"{name!r} is on {tensor.device}, but the replicas receive over "
                    f"engine {self._engine.name!r}, and this rank puts from {wanted}"
                )
                raise PlanError(message)


class OneEngine:
    """Sees to it that all of a job use the same engine; the leader's."""

    def __init__(self, replicas: Mapping[int, Replica]) -> None:
        self._replicas: Final = replicas
        self._trainers: Final[dict[str, EngineName]] = {}

    def trainer(self, rank: int, engine: EngineName | None) -> None:
        """Admit a trainer rank; PlanError where another engine is in use."""
        if engine is not None:
            self._check(f"trainer rank {rank}", engine)
            self._trainers[f"trainer rank {rank}"] = engine

    def replica(self, name: str, engine: EngineName) -> None:
        """Admit a replica; PlanError where another engine is in use."""
        self._check(f"replica {name!r}", engine)

    def _check(self, who: str, engine: EngineName) -> None:
        used = dict(self._trainers)
        for replica in self._replicas.values():
            used[f"replica {replica.name!r}"] = replica.engine
        for other, theirs in used.items():
            if theirs != engine and other != who:
                message = (
                    f"{who} uses engine {engine!r} and {other} uses {theirs!r}: the "
                    f"tensors of a job are all on the CPU or all on GPUs"
                )
                raise PlanError(message)
