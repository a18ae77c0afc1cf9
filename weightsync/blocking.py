"""The transports for synchronous code: the same, with plain methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.admittance import check_names
from weightsync.base import Face
from weightsync.core import (
    DEFAULT_TIMEOUT,
    SessionT,
    generator_core,
    observer_core,
    trainer_core,
)
from weightsync.errors import ClosedError
from weightsync.events import BlockingEvents
from weightsync.lease import Lease
from weightsync.messages import Terms
from weightsync.observing import ObserverSession
from weightsync.pushing import PushOptions
from weightsync.rejoining import GeneratorSession
from weightsync.session import TrainerSession
from weightsync.vigil import DEFAULT_LEASE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal, Self

    from weightsync.elastic import Admit
    from weightsync.membership import Membership
    from weightsync.messages import OnBusy, Require
    from weightsync.names import Rule
    from weightsync.stats import PushReport, Update


class _Blocking(Face[SessionT]):
    """A context manager over a core; calls block the calling thread only."""

    def __enter__(self) -> Self:
        """Open."""
        runtime, session = self._core.begin()
        try:
            runtime.call(session.open)
        except BaseException:
            self.close()  # also what had just succeeded when it was interrupted
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Leave the job and end everything that was started. Idempotent."""
        runtime, session = self._core.end(), self._core.last_session
        if runtime is None or session is None:
            return
        try:
            runtime.call(session.close)
        finally:
            runtime.close()


class Trainer(_Blocking[TrainerSession]):
    """``weightsync.Trainer`` with plain methods; see there."""

    def __init__(  # noqa: PLR0913 -- one option each, all by keyword.
        self,
        address: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        lease: float = DEFAULT_LEASE,
        epoch: int | None = None,
        replay: bool = False,
        admit: Admit = "all",
        engine: Literal["shm", "nccl", "torch-nccl2"] | None = None,
        staging_bytes: int | None = None,
        staging: Literal["copy", "none"] = "copy",
        memory: Mapping[str, object] | Iterable[tuple[str, object]] | None = None,
    ) -> None:
        place = address, rank, world_size, job, timeout, lease
        chosen = epoch, replay, admit, engine, staging_bytes
        super().__init__(trainer_core(*place, *chosen, staging, memory), timeout)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas that the next push goes to."""
        return self._core.session.rank.replicas

    def wait_for_replicas(
        self, count: int, *, timeout: float | None = None
    ) -> tuple[str, ...]:
        """Wait until the pool has ``count`` replicas; return the names of all."""
        session = self._core.session
        return self._core.runtime.call(
            session.rank.wait_for_replicas, count, self._seconds(timeout)
        )

    def membership(self, *, timeout: float | None = None) -> Membership:
        """Return who is in the job now; see ``weightsync.Trainer.membership``."""
        session = self._core.session
        return self._core.runtime.call(
            session.rank.following.ask, self._seconds(timeout)
        )

    def propose(
        self, replicas: Iterable[str] | None, *, timeout: float | None = None
    ) -> Membership:
        """Let the pool be these replicas; see ``weightsync.Trainer.propose``."""
        names = None if replicas is None else check_names(replicas)
        following = self._core.session.rank.following
        seconds = self._seconds(timeout)
        return self._core.runtime.call(following.propose, names, seconds)

    def events(self, *, after: int | None = None) -> BlockingEvents:
        """Return an iterator over membership events; see ``weightsync.Trainer``."""
        following = self._core.session.rank.following
        number = following.number if after is None else after
        return BlockingEvents(self._core.runtime, following, number)

    def push(  # noqa: PLR0913 -- one option each, all by keyword.
        self,
        state_dict: Mapping[str, object] | Iterable[tuple[str, object]],
        *,
        version: int | None = None,
        partial: bool = False,
        cast: bool = False,
        check_replicas: bool = False,
        on_busy: OnBusy = "wait",
        require: Require = "any",
        timeout: float | None = None,
        ignore: Sequence[str] = (),
        names: Sequence[Rule] = (),
    ) -> PushReport:
        """Put the weights into every replica; see ``weightsync.Trainer.push``."""
        session = self._core.session
        terms = Terms(version, partial, on_busy, require, cast, check_replicas)
        seconds = self._seconds(timeout)
        after = session.rank.engines.mark()
        options = PushOptions(terms, seconds, ignore, names, after)
        return self._core.runtime.call(session.rank.push, state_dict, options)


class Generator(_Blocking[GeneratorSession]):
    """``weightsync.Generator`` with plain methods; see there."""

    def __init__(  # noqa: PLR0913 -- one option each, all by keyword.
        self,
        address: str | None,
        state_dict: Mapping[str, object] | Iterable[tuple[str, object]],
        *,
        replica: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mode: Literal["staged", "swap", "inplace"] = "staged",
        names: Sequence[Rule] = (),
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        lease: float = DEFAULT_LEASE,
        engine: Literal["shm", "nccl", "torch-nccl2"] | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        core, self._tensors = generator_core(
            address,
            state_dict,
            replica,
            rank,
            world_size,
            mode,
            names,
            job,
            timeout,
            lease,
            engine,
            segment_bytes,
        )
        super().__init__(core, timeout)

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self._core.session.replica

    @property
    def version(self) -> int | None:
        """The version that the tensors hold; None before the first."""
        return self._core.session.reading.epochs.version

    @property
    def pending(self) -> int | None:
        """The version that is whole and waits for ``receive``, if any."""
        return self._core.session.reading.epochs.pending

    def receive(self, *, timeout: float | None = None) -> Update:
        """Wait for the next whole version; see ``weightsync.Generator.receive``."""
        session = self._core.session
        session.note()
        return self._core.runtime.call(session.receive, self._seconds(timeout))

    def use(self) -> Lease:
        """Return a read lease: ``with transport.use() as weights``."""
        return Lease(self._core, self._tensors)

    def __iter__(self) -> Self:
        """Iterate over the versions to come, until the trainers close; repeatedly."""
        return self

    def __next__(self) -> Update:
        """Receive the next version, however long it takes."""
        session = self._core.session
        session.note()
        try:
            return self._core.runtime.call(session.receive, None)
        except ClosedError:
            raise StopIteration from None


class Observer(_Blocking[ObserverSession]):
    """``weightsync.Observer`` with plain methods; see there."""

    def __init__(
        self,
        address: str | None = None,
        *,
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        lease: float = DEFAULT_LEASE,
    ) -> None:
        super().__init__(observer_core(address, job, timeout, lease), timeout)

    def membership(self, *, timeout: float | None = None) -> Membership:
        """Return who is in the job now; see ``weightsync.Trainer.membership``."""
        session = self._core.session
        return self._core.runtime.call(session.following.ask, self._seconds(timeout))

    def propose(
        self, replicas: Iterable[str] | None, *, timeout: float | None = None
    ) -> Membership:
        """Let the pool be these replicas; see ``weightsync.Trainer.propose``."""
        names = None if replicas is None else check_names(replicas)
        following = self._core.session.following
        seconds = self._seconds(timeout)
        return self._core.runtime.call(following.propose, names, seconds)

    def events(self, *, after: int | None = None) -> BlockingEvents:
        """Return an iterator over membership events; see ``weightsync.Trainer``."""
        following = self._core.session.following
        number = following.number if after is None else after
        return BlockingEvents(self._core.runtime, following, number)
