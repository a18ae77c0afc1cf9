"""Trainer and Generator: what users call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.admittance import check_names
from weightsync.base import Transport
from weightsync.core import (
    DEFAULT_TIMEOUT,
    generator_core,
    trainer_core,
)
from weightsync.errors import ClosedError
from weightsync.events import Events
from weightsync.lease import Lease
from weightsync.messages import Terms
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


class Trainer(Transport[TrainerSession]):
    """One trainer rank of a job.

    Enter it with ``async with``: rank 0 serves the store at the address and leads the
    job, the other ranks wait for it. Not bound to an event loop: it may be used from
    any thread and from successive ``asyncio.run`` calls, also on trio.

    Args:
        address: ``tcp://host:port`` or ``file:///path``; ``WEIGHTSYNC_STORE`` by
            default. Port 0 picks a port; see ``address``.
        rank: of this process among the trainers; by default that of
            ``torch.distributed``, or of the launcher's environment, or 0.
        world_size: number of trainer ranks; default likewise.
        job: distinguishes jobs that share a store.
        timeout: seconds for opening, and for calls that are given none.
        lease: seconds without a sign of life from this process after which its peers
            take it for dead, and it them. Signs are given whatever the program does;
            only a process that is stopped, or holds the GIL for so long, gives none.
        epoch: begins a new count of versions, if it is higher than that of the
            replicas; the same on all ranks. By default versions continue above the
            highest that a replica of the pool holds, in its epoch.
        replay: keep one copy of this rank's shards of the last version in memory of the
            host, also of those on a GPU, so that a replica that joins gets that version
            at once. Copying takes part of each push; see docs/benchmarks.md.
        admit: ``"all"`` replicas that come, or only ``"proposed"`` ones, so that none
            is in before the first ``propose``.
        engine: ``"shm"`` for tensors on the CPU, ``"nccl"`` or ``"torch-nccl2"`` on the
            GPU that is current now; by default that of the replicas. All use the same.
        staging_bytes: the most GPU memory that this rank takes for its transfers over
            NCCL; by default as much as docs/gpu.md says. A replica that needs more is
            not let in: then ``wait_for_replicas``, and ``push`` where there is no other
            replica, raise a PlanError that says how much would do.
        staging: ``"copy"`` puts copies of the tensors over NCCL, out of staging memory.
            ``"none"`` puts them out of ``memory`` itself, but for rows that only lie
            together in a replica; whatever is pushed has to be there, and contiguous.
            Over shared memory nothing is staged in any case.
        memory: for ``staging="none"`` what will be pushed, or anything in the same
            allocations: a state dict, as for ``push``, of tensors that were made in
            ``with weightsync.nccl_memory():``. These allocations are registered whole
            by every link, and kept while the trainer is there.

    Trainers may be restarted at the same address while generators stay. Those before
    them that are still there, as with a file store, then raise FencedError.

    Raises PlanError for an ``admit`` or ``staging`` that is neither, and for ``memory``
    that NCCL does not know, by name; UnsupportedError for an engine that cannot be
    used, or not without staging; on entering PlanError for a rank, world size, epoch,
    ``replay`` or ``admit`` that does not fit rank 0, PeerError for an address that is
    taken, TimedOutError when rank 0 does not come.
    """

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

    async def wait_for_replicas(
        self, count: int, *, timeout: float | None = None
    ) -> tuple[str, ...]:
        """Wait until the pool has ``count`` replicas; return the names of all.

        Raises TimedOutError saying how many joined, which, and who is not in yet.
        """
        session = self._core.session
        seconds = self._seconds(timeout)
        return await self._core.runtime.acall(
            session.rank.wait_for_replicas, count, seconds
        )

    async def membership(self, *, timeout: float | None = None) -> Membership:
        """Return who is in the job now, as the leader (trainer rank 0) knows it.

        Raises TimedOutError, PeerError where the trainers failed.
        """
        session = self._core.session
        seconds = self._seconds(timeout)
        return await self._core.runtime.acall(session.rank.following.ask, seconds)

    async def propose(
        self, replicas: Iterable[str] | None, *, timeout: float | None = None
    ) -> Membership:
        """Let the pool be the replicas of these names, until the next proposal.

        One that is in the pool and not named is removed: its calls raise a PeerError
        that gives the number of the proposal, and a push to it ends there as skipped.
        One that is named and waits is linked; one that is named and not here yet, when
        it comes; one that comes and is not named waits, connected. ``None`` admits
        every replica again. The same on every trainer rank, whichever calls it; an
        ``Observer`` may too. Returns who is in the job then.

        Raises PlanError for names that are empty, too long, or given twice, before
        anything changes; TimedOutError, PeerError where the trainers failed.
        """
        names = None if replicas is None else check_names(replicas)
        session = self._core.session
        seconds = self._seconds(timeout)
        following = session.rank.following
        return await self._core.runtime.acall(following.propose, names, seconds)

    def events(self, *, after: int | None = None) -> Events:
        """Return an async iterator over membership events.

        Who joined, left, failed or was fenced, and why: the same on every trainer rank,
        in the same order, under the same numbers. It begins now, or ``after`` an
        event's number: 0, or that of a ``membership``, so that nothing is missed in
        between. The last 1024 events are remembered; a gap in the numbers shows that
        older ones are forgotten.
        """
        following = self._core.session.rank.following
        number = following.number if after is None else after
        return Events(self._core.runtime, following, number)

    async def push(  # noqa: PLR0913 -- one option each, all by keyword.
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
        """Put the weights into every replica of the pool; all trainer ranks call it.

        Each rank passes what it holds: whole tensors (ranks that hold the same split
        the work), shards (``DTensor``, ``Shard``), or its own names. The tensors must
        stay unchanged until this returns, and may change at once after, however it
        ends: a put that NCCL does not end may still read them, with
        ``staging="none"``, but what it reads goes to a replica that was removed. When
        this returns, every rank of a ``delivered`` replica holds the whole version;
        ``receive`` switches it in.

        Args:
            state_dict: names to tensors, or pairs of both, as ``named_parameters()``
                gives them.
            version: must increase, also over what replicas hold when they join; the
                last one plus 1 by default. Pushes that overlap
                on one rank are matched with those of the other ranks in the order of
                the calls: give each its version where that order might differ.
            partial: allow names of the replicas to be missing; they keep their values.
            cast: convert floating point tensors to the dtype of the replica, rounding
                as torch does. Without it a dtype that differs is an error.
            check_replicas: compare what several trainer ranks hold alike before
                anything moves; a difference is an error that names the tensor, the box
                and the ranks. It reads all of that once, at about 1 GB/s a rank.
                Without it such a tensor arrives whole, from one of the copies.
            on_busy: ``"wait"`` until a replica has switched the version before in, or
                ``"skip"`` it.
            require: ``"any"`` raises when no replica was delivered to and one failed,
                ``"all"`` when any failed.
            timeout: seconds for the whole call.
            ignore: patterns (as in ``fnmatch``) of names to leave out.
            names: rules (``weightsync.names``) that say which pushed tensors a tensor
                of ``state_dict`` is made of.

        Raises the same on every rank: PlanError (DtypeError) when what is pushed does
        not fit, before any byte moves; PeerError and TimedOutError when replicas failed
        or a trainer rank did, ProtocolError when replicas plan otherwise than the
        trainers; their ``report`` tells what became of each replica.
        ClosedError when another rank was cancelled. A failed push leaves every replica
        with the whole old or the whole new version.
        """
        session = self._core.session
        terms = Terms(version, partial, on_busy, require, cast, check_replicas)
        seconds = self._seconds(timeout)
        after = session.rank.engines.mark()
        options = PushOptions(terms, seconds, ignore, names, after)
        return await self._core.runtime.acall(session.rank.push, state_dict, options)


class Generator(Transport[GeneratorSession]):
    """One rank of a replica.

    Enter it with ``async with``: it joins the pool of the trainers at the address,
    which may come later. From then on versions arrive by themselves; ``receive``
    switches them into the tensors. It outlives its trainers: see ``receive``. Not bound
    to an event loop, like ``Trainer``.

    Args:
        address: of the trainers' store; ``WEIGHTSYNC_STORE`` by default.
        state_dict: names to the tensors that are to receive the weights, or pairs of
            both. They may be views, as of one fused tensor, as long as they do not
            overlap. In modes "swap" and "inplace" they fill at least half of each
            storage that they are in; what lies beside them keeps its value.
        replica: name of the replica, the same on all of its ranks.
        rank: of this process in the replica; by default that of ``torch.distributed``,
            or of the launcher's environment, or 0.
        world_size: number of ranks of the replica; default likewise.
        mode: ``"staged"`` copies a version into the tensors when it is switched in;
            ``"swap"`` re-points their storages, so ``data_ptr`` changes at each switch;
            ``"inplace"`` lets versions arrive in the tensors themselves, which cannot
            be read between the call of ``receive`` and its return; where it times out
            in the middle of a version, not before the next one returns.
        names: rules (``weightsync.names``) that say which pushed tensors these are made
            of, as where q, k and v are pushed and the engine has them in one tensor.
        job: distinguishes jobs that share a store.
        timeout: seconds for opening, and for calls that are given none.
        lease: seconds without a sign of life from this process after which its peers
            take it for dead, and it them. Signs are given whatever the program does;
            only a process that is stopped, or holds the GIL for so long, gives none.
        engine: ``"shm"`` for tensors on the CPU, ``"nccl"`` or ``"torch-nccl2"`` for
            tensors on a GPU (see docs/gpu.md); by default the former that fits.
        segment_bytes: of the allocations that the window is made of, with ``"nccl"``;
            one that holds a larger tensor is larger. Trainer ranks need about twice as
            much for their transfers.

    Raises PlanError, DtypeError or UnsupportedError for tensors that cannot be received
    into, and PlanError for rules that do not fit them; on entering, PlanError for a
    name or rank that is taken, TimedOutError when the trainers do not come.
    """

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
        """The version that the tensors hold; None before the first, "not ready".

        It stays while there are no trainers.
        """
        return self._core.session.reading.epochs.version

    @property
    def pending(self) -> int | None:
        """The version that is whole and waits for ``receive``, if any."""
        return self._core.session.reading.epochs.pending

    async def receive(self, *, timeout: float | None = None) -> Update:
        """Wait for the next whole version and switch it in.

        All ranks of a replica receive the same versions in the same order. What is
        whole is received even if the trainers are gone meanwhile.

        Raises TimedOutError, after which it may be called again; ClosedError when the
        trainers have closed; PeerError when they, or another rank of this replica,
        failed. The tensors then keep the last version, and ``use`` works throughout.

        That is raised once. The next call joins again, within its own timeout: trainers
        that were restarted, or the same ones where this replica was removed. Each rank
        of a replica does so by its own call, and they wait for one that is replaced.
        PlanError says that this replica was refused, as where it holds a version of a
        later epoch. In modes "swap" and "inplace" the tensors move into new memory
        then: ``data_ptr`` changes, no lease may be held, and for that moment the window
        is there twice.
        """
        session = self._core.session
        seconds = self._seconds(timeout)
        session.note()
        return await self._core.runtime.acall(session.receive, seconds)

    def use(self) -> Lease:
        """Return a read lease: ``with transport.use() as weights``."""
        return Lease(self._core, self._tensors)

    def __aiter__(self) -> Self:
        """Iterate over the versions to come, until the trainers close.

        It may be iterated over again, for those of the next trainers.
        """
        return self

    async def __anext__(self) -> Update:
        """Receive the next version, however long it takes."""
        session = self._core.session
        session.note()
        try:
            return await self._core.runtime.acall(session.receive, None)
        except ClosedError:
            raise StopAsyncIteration from None
