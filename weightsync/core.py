"""What the asynchronous and the blocking transports have in common."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch.distributed

from weightsync.counting import check_epoch
from weightsync.engines import Engines, checked, device_of, engine_on
from weightsync.epoch import Mode
from weightsync.errors import ClosedError, PlanError
from weightsync.layout import register
from weightsync.observing import ObserverSession
from weightsync.place import Place
from weightsync.rejoining import GeneratorSession
from weightsync.runtime import Runtime
from weightsync.session import (
    Session,
    TrainerSession,
    check_timeout,
)
from weightsync.store import parse_address
from weightsync.straight import straight_from
from weightsync.vigil import check_lease
from weightsync.weights import check_mode, check_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from weightsync.elastic import Admit
    from weightsync.locate import StateDict
    from weightsync.names import Rule

DEFAULT_TIMEOUT = 300.0
"""Seconds, where neither the transport nor the call is given a timeout."""

SessionT = TypeVar("SessionT", bound=Session)


class Core(Generic[SessionT]):
    """What the asynchronous and the blocking face of a transport share."""

    def __init__(self, name: str, make: Callable[[Runtime], SessionT]) -> None:
        self.name = name
        self._make = make
        self._runtime: Runtime | None = None
        self._session: SessionT | None = None
        self._closed = False

    def __repr__(self) -> str:
        """Show who and in which state."""
        if self._closed:
            return f"<{self.name}, closed>"
        return f"<{self.name}, {'open' if self._session is not None else 'not opened'}>"

    @property
    def open(self) -> bool:
        """Whether it was opened and not closed."""
        return self._runtime is not None and not self._closed

    @property
    def runtime(self) -> Runtime:
        """The runtime; ClosedError before opening, after closing, and after a fork."""
        if self._closed or self._runtime is None:
            state = "closed" if self._closed else "not opened: enter it first"
            raise ClosedError(f"{self.name} is {state}")
        self._runtime.check()
        return self._runtime

    @property
    def session(self) -> SessionT:
        """The open session; raises as ``runtime`` does."""
        self.runtime.check()
        if self._session is None:
            raise ClosedError(f"{self.name} is not opened yet")
        return self._session

    @property
    def last_session(self) -> SessionT | None:
        """The session, also after closing."""
        return self._session

    def begin(self) -> tuple[Runtime, SessionT]:
        """Start the runtime for a new session."""
        if self._runtime is not None:
            raise ClosedError(f"{self.name} can be entered once")
        runtime = self._runtime = Runtime(self.name)

        async def make() -> SessionT:
            """Make it in its loop: events belong to the kind of loop they come from."""
            return self._make(runtime)

        self._session = runtime.call(make)
        return runtime, self._session

    def end(self) -> Runtime | None:
        """Mark it closed; return the runtime that is to be ended, once."""
        if self._closed or self._runtime is None:
            self._closed = True
            return None
        self._closed = True
        try:
            self._runtime.check()
        except ClosedError:
            return None
        return self._runtime


def trainer_core(  # noqa: PLR0913, PLR0917 -- what Trainer is given, handed on.
    address: str | None,
    rank: int | None,
    world_size: int | None,
    job: str,
    timeout: float,
    lease: float,
    epoch: int | None,
    replay: bool,
    admit: Admit,
    engine: str | None,
    staging_bytes: int | None,
    staging: str,
    memory: StateDict | None,
) -> Core[TrainerSession]:
    """Build the core of a Trainer; see there."""
    place = _place(address, rank, world_size, job, timeout, lease)
    place = replace(place, epoch=check_epoch(epoch))
    if admit not in {"all", "proposed"}:
        raise PlanError(f"admit is 'all' or 'proposed', not {admit!r}")
    straight = straight_from(staging, memory)
    engines = Engines(checked(engine), staging_bytes, straight)
    name = f"trainer rank {place.rank} of {place.world_size}"

    def make(runtime: Runtime) -> TrainerSession:
        return TrainerSession(
            place, runtime.tasks, engines, replay=bool(replay), admit=admit
        )

    return Core(name, make)


def observer_core(
    address: str | None, job: str, timeout: float, lease: float
) -> Core[ObserverSession]:
    """Build the core of an Observer; see there."""
    place = _place(address, 0, 1, job, timeout, lease)
    return Core("observer", lambda runtime: ObserverSession(place, runtime.tasks))


class _Joined(NamedTuple):
    core: Core[GeneratorSession]
    tensors: dict[str, Tensor]


def generator_core(  # noqa: PLR0913, PLR0917 -- what Generator is given, handed on.
    address: str | None,
    state_dict: StateDict,
    replica: str | None,
    rank: int | None,
    world_size: int | None,
    mode: str,
    names: Sequence[Rule],
    job: str,
    timeout: float,
    lease: float,
    engine: str | None,
    segment_bytes: int | None,
) -> _Joined:
    """Build the core of a Generator; see there."""
    place = _place(address, rank, world_size, job, timeout, lease)
    if replica is None:
        if place.world_size > 1:
            raise PlanError("the ranks of a replica need its name: replica=")
        replica = f"{socket.gethostname()}-{os.getpid()}"
    chosen = _mode(mode)
    mirrored = chosen is not Mode.STAGED
    registered = register(state_dict, names=names, mirrored=mirrored)
    device = device_of(registered.tensors, registered.labels, checked(engine))
    chosen_engine = engine_on(device, checked(engine), segment=segment_bytes)
    chosen_engine.note()
    check_mode(chosen, registered)
    check_writable(registered)
    name = f"rank {place.rank} of replica {replica!r}"

    def make(runtime: Runtime) -> GeneratorSession:
        return GeneratorSession(
            place,
            runtime.tasks,
            replica=replica,
            mode=chosen,
            registered=registered,
            engine=chosen_engine,
        )

    return _Joined(Core(name, make), dict(registered.entries))


def _mode(mode: str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(repr(known.value) for known in Mode)
        raise PlanError(f"a mode is one of {known}, not {mode!r}") from None


def _place(
    address: str | None,
    rank: int | None,
    world_size: int | None,
    job: str,
    timeout: float,
    lease: float,
) -> Place:
    rank = _default_rank() if rank is None else rank
    world_size = _default_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is not in a world of size {world_size}")
    return Place(
        parse_address(address),
        job,
        rank,
        world_size,
        check_timeout(timeout),
        check_lease(lease),
    )


def _default_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _default_world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
