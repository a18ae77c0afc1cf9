"""Which engine is used: chosen from the device of the tensors, one for all of a job."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final

import torch

from weightsync.budget import LEAST_SEGMENT, Budget
from weightsync.engine import LOOPBACK, ShmEngine
from weightsync.engine_nccl import NcclEngine
from weightsync.engine_torch import TorchNcclEngine
from weightsync.errors import PlanError, UnsupportedError, WeightSyncError
from weightsync.lane import translated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from weightsync.announcing import EngineName
    from weightsync.engine import Engine
    from weightsync.pieces import Piece
    from weightsync.replica import Replica
    from weightsync.straight import Straight

_DEVICES: Final[Mapping[EngineName, str]] = {
    "shm": "cpu",
    "nccl": "cuda",
    "torch-nccl2": "cuda",
}


NO_STRAIGHT: Final = (
    "staging='none' needs engine 'nccl' or 'shm': torch's own windows of 'torch-nccl2' "
    "are not made of memory of ours"
)


def checked(engine: str | None) -> EngineName | None:
    """Return an engine's name; PlanError for what is none."""
    if engine is None:
        return None
    for known in _DEVICES:
        if engine == known:
            return known
    names = ", ".join(map(repr, _DEVICES))
    raise PlanError(f"engine is one of {names} or None, not {engine!r}")


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


def engine_on(
    device: torch.device | None,
    name: EngineName | None = None,
    *,
    segment: int | None = None,
    budget: Budget | None = None,
    sources: Sequence[torch.Tensor] = (),
) -> Engine:
    """Make the engine of a device: of this name, or the usual one.

    With segments of so many bytes where it has some, a budget for transfers, and what
    they come straight from. Raises PlanError for segments that are too small,
    UnsupportedError where the engine cannot be used, or not so.
    """
    if segment is not None and segment < LEAST_SEGMENT:
        raise PlanError(f"segment_bytes={segment}: {LEAST_SEGMENT} are the least")
    if name == "torch-nccl2":
        if sources:
            raise UnsupportedError(NO_STRAIGHT)
        return TorchNcclEngine(device, budget=budget)
    if name == "shm" or (device is not None and device.type == "cpu"):
        return ShmEngine()
    return NcclEngine(device, segment=segment, budget=budget, sources=sources)


def _current_device() -> torch.device | None:
    """Return the GPU that this thread has chosen; does not begin to use it."""
    compiled = torch._C  # pyright: ignore[reportPrivateUsage] # no other
    current: Callable[[], int] | None = getattr(compiled, "_cuda_getDevice", None)
    with suppress(RuntimeError):  # where there is no GPU
        return None if current is None else torch.device("cuda", current())
    return None


class Engines:
    """The engine of a trainer rank: as it was told, or as the first replica has it.

    On a GPU it is the device that is current where the trainer is made, and ``staging``
    bytes bound its memory for transfers; PlanError where these are too few, or where
    what is put ``straight`` is elsewhere. ``host`` is that of the engine.
    """

    def __init__(
        self,
        name: EngineName | None,
        staging: int | None = None,
        straight: Straight | None = None,
    ) -> None:
        self.name: Final = name
        self.host = LOOPBACK
        self._budget: Final = Budget(staging)
        self._lock: Final = threading.Lock()
        self._engine: Engine | None = None
        if name not in {None, "shm"} and not torch.cuda.is_available():
            raise UnsupportedError(f"engine {name!r} needs a GPU, and there is none")
        self._device: Final = None if name == "shm" else _current_device()
        if straight is not None and name == "torch-nccl2":
            raise UnsupportedError(NO_STRAIGHT)
        self._straight: Final = straight
        self._sources: Final = () if straight is None else straight.windows
        for source in self._sources:
            if source.device != self._device:
                where = f"puts from {self._device or 'the CPU'}"
                message = f"a tensor of it is on {source.device}, and this rank {where}"
                raise PlanError(f"memory: {message}")

    def get(self, name: EngineName) -> Engine:
        """Return the engine of this name. Raises PlanError, UnsupportedError."""
        with self._lock:
            if self._engine is None or self._engine.name != name:
                self._engine = engine_on(
                    self._device, name, budget=self._budget, sources=self._sources
                )
                self._engine.host = self.host
            return self._engine

    def mark(self) -> object:
        """Return what the caller gave the device to do until now.

        Also where no replica has said yet which engine it is: one may come meanwhile.
        Returns the error where the device has failed: it is one of the whole push.
        """
        try:
            with translated():
                return self._mark()
        except WeightSyncError as error:
            return error

    def _mark(self) -> object:
        if self._engine is not None:
            return self._engine.mark()
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # of torch
        if self._device is None or not begun:
            return None
        return (torch.cuda.current_stream(self._device).record_event(),)

    def ordered(self, after: object) -> AbstractContextManager[None]:
        """Let this thread work on the device, after a mark."""
        engine = self._engine
        return nullcontext() if engine is None else engine.ordered(after)

    def check_budget(self) -> None:
        """Raise the PlanError of the last replica, if the budget was too small."""
        if self._engine is not None and self._engine.refusal is not None:
            raise self._engine.refusal

    def check_pieces(self, pieces: Sequence[Piece]) -> None:
        """Raise PlanError for pieces that must not be copied, and would be."""
        if self._straight is not None:
            self._straight.check_pieces(pieces)

    def check(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Raise PlanError for tensors that the engine in use cannot put.

        Or that it could not, where NCCL may be used: a replica may come meanwhile.
        """
        if self._straight is not None and any(each.is_cuda for each in tensors):
            self._straight.check(tensors, names)
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
