"""The hub of a replica: its rank 0 speaks with the leader for all of its ranks.

It also decides when a version is whole: when every rank has everything. That decision
needs no trainer, so a trainer that dies cannot leave the ranks at different versions.
Nothing here waits: methods take what happened and post what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
from msgspec.structs import replace

from weightsync.announcing import AllPut
from weightsync.elastic import Present, RollCall
from weightsync.errors import (
    FencedError,
    OtherStartError,
    PeerError,
    PlanError,
    ProtocolError,
    WeightSyncError,
)
from weightsync.fencing import check_incarnation
from weightsync.hellos import RankHello, ReplicaHello
from weightsync.messages import (
    Accepted,
    Agree,
    Agreed,
    Arrived,
    Commit,
    Credit,
    Delivered,
    Discard,
    Discarded,
    Ended,
    Expect,
    Fault,
    FormLink,
    FromRank,
    Layout,
    Leaving,
    LinkFailed,
    LinkReady,
    Manifests,
    ToReplica,
    Withdraw,
    Withdrawn,
)
from weightsync.plan import sum_of_digests
from weightsync.silence import Silence
from weightsync.succession import Attendance
from weightsync.together import Together
from weightsync.vigil import DEFAULT_LEASE

if TYPE_CHECKING:
    from weightsync.announcing import EngineName
    from weightsync.peer import Peer
    from weightsync.spec import Manifest


class Hub:
    """Lives in the loop of rank 0 of a replica.

    A ``patient`` one waits for ranks that go before the replica is introduced.
    """

    def __init__(  # noqa: PLR0913 -- what rank 0 says of the replica, one each.
        self,
        replica: str,
        mode: str,
        world_size: int,
        lease: float = DEFAULT_LEASE,
        instance: str = "",
        engine: EngineName = "shm",
        *,
        patient: bool = False,
    ) -> None:
        self.replica: Final = replica
        self.instance: Final = instance
        self.patient: Final = patient
        self.world_size: Final = world_size
        self.lease: Final = lease
        self.engine: Final = engine
        self.complete = anyio.Event()
        self.ended: Ended | None = None
        self.term = ""
        self._mode: Any = mode
        self._leader: Peer | None = None
        self._ranks: dict[int, Peer] = {}
        self._manifests: dict[int, Manifest] = {}
        self._hellos: dict[int, RankHello] = {}
        self._ready: set[int] = set()
        self._planned: dict[int, dict[int, bytes]] = {}
        self._faults: dict[int, Fault] = {}
        self._credits: dict[int, int] = {}
        self._credited = False
        self._withdrawing: set[int] = set()
        self._silence = Silence(self._ranks)
        self._attendance = Attendance(world_size)
        self._arrived: set[int] = set()
        self._committed = 0
        self._sequence = 0

    # Forming the replica

    def rank_joined(self, hello: RankHello, manifest: Manifest, peer: Peer) -> None:
        """Admit a rank; PlanError where it does not belong."""
        if self.ended is not None:
            raise PeerError(f"replica {self.replica!r} has ended")
        mine = (self.replica, self.world_size, self._mode, self.engine)
        theirs = (hello.replica, hello.world_size, hello.mode, hello.engine)
        if mine != theirs or hello.rank >= self.world_size:
            message = (
                f"rank {hello.rank} with (replica, world_size, mode, engine) {theirs} "
                f"does not fit rank 0 with {mine}"
            )
            raise PlanError(message)
        who = f"rank {hello.rank} of replica {self.replica!r}"
        check_incarnation(who, hello.incarnation, "rank 0")
        if hello.rank in self._ranks:
            message = f"replica {self.replica!r} has a rank {hello.rank} already"
            raise OtherStartError(message)
        self._ranks[hello.rank] = peer
        self._hellos[hello.rank] = hello
        self._manifests[hello.rank] = manifest
        if self.world_size > 1:
            peer.post(Accepted())
        if len(self._ranks) == self.world_size:
            self.complete.set()

    @property
    def introduced(self) -> bool:
        """Whether the replica is in the pool, or about to be."""
        return self._leader is not None and self.ended is None

    def supersede(self) -> bool:
        """Give way to another rank 0, unless the replica was introduced already."""
        if self._leader is not None or self.ended is not None:
            return False
        message = f"another process has become rank 0 of replica {self.replica!r}"
        self.end(Ended(Fault.of(FencedError(message))))
        return True

    def _forget(self, rank: int) -> None:
        """There is no replica yet: another process may still become this rank.

        Ranks that join again come and go with the timeouts of their callers.
        """
        for known in (self._ranks, self._hellos, self._manifests):
            known.pop(rank, None)
        if self.complete.is_set():
            self.complete = anyio.Event()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self._ranks]

    @property
    def hello(self) -> ReplicaHello:
        """What to say to the leader; PeerError while a rank is missing."""
        if self.missing:
            message = f"replica {self.replica!r}: ranks {self.missing} are missing"
            raise PeerError(message)
        hellos = [self._hellos[rank] for rank in range(self.world_size)]
        versions = [hello.last for hello in hellos]
        known = [version for version in versions if version is not None]
        return ReplicaHello(
            self.replica,
            self._mode,
            self.world_size,
            self.lease,
            max(known, default=None),
            all(hello.holds for hello in hellos) and len(set(versions)) == 1,
            self.instance,
            self.engine,
        )

    def is_as(self, hello: ReplicaHello) -> bool:
        """Whether this is still what to say."""
        return self.ended is None and not self.missing and self.hello == hello

    def speak(self, leader: Peer) -> None:
        """Introduce the replica, which is complete, to the leader."""
        self._leader = leader
        leader.post(self.held)

    @property
    def held(self) -> Manifests:
        """What follows the hello to the leader."""
        hellos = [self._hellos[rank] for rank in range(self.world_size)]
        handles = tuple([hello.handle for hello in hellos])
        segments = tuple([hello.segment for hello in hellos])
        return Manifests(self._together, handles, segments)

    @property
    def _together(self) -> Together:
        return Together.of(self._manifests[rank] for rank in range(self.world_size))

    # What ranks say

    def on_rank(  # noqa: C901 -- one case a message.
        self, rank: int, message: FromRank
    ) -> None:
        """Act on what a rank of the replica says."""
        match message:
            case LinkReady():
                self._ready.add(rank)
                if len(self._ready) == self.world_size:
                    self._tell_leader(message)
            case LinkFailed():
                self._faults[rank] = message.fault
                reason = self._reason(rank, message.fault.error())
                self._tell_leader(LinkFailed(message.link, Fault.of(reason)))
            case Agreed():
                self._on_agreed(rank, message)
            case Credit():
                self._credits[rank] = message.slot
                self._give_credit()
            case Withdraw():
                self._withdraw(rank)
            case Arrived():
                self._on_arrived(rank, message)
            case Present():
                self._on_present(rank, message)
            case Leaving():
                if self._leader is not None or not self.patient:
                    self.rank_lost(rank, PeerError("it left"), clean=True)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(message).__name__}")

    def rank_lost(self, rank: int, error: WeightSyncError, *, clean: bool) -> None:
        """A replica that lacks a rank is no replica: it leaves the pool."""
        if self.ended is not None:
            return
        if self.patient and self._leader is None:
            self._forget(rank)
            return
        if rank in self._faults:  # for which it leaves, whatever comes first
            error, clean = self._faults[rank].error(), False
        if clean:
            self._tell_leader(Leaving())
        reason = self._reason(rank, None if clean else error)
        if not clean:
            self._tell_leader(LinkFailed(0, Fault.of(reason)))
        # The trainers may put already what the leader's word for it has not come of.
        self.end(Ended(Fault.of(reason), untold=True))

    def _reason(self, rank: int, error: WeightSyncError | None) -> PeerError:
        """Say what became of a rank: it failed, or it left."""
        what = "left" if error is None else f"failed: {error}"
        return PeerError(f"rank {rank} of replica {self.replica!r} {what}")

    def end(self, message: Ended) -> None:
        """There will be no more versions: tell all ranks."""
        if self.ended is not None:
            return
        self.ended = message
        self.complete.set()
        for peer in self._ranks.values():
            peer.post(message)
            peer.finish()
        if self._leader is not None:
            self._leader.finish()

    def look(self) -> None:
        """Tell the leader where a rank gives no signs of life; now and then."""
        quiet = self._silence.look()
        if quiet is not None:
            self._tell_leader(quiet)

    def _on_agreed(self, rank: int, message: Agreed) -> None:
        """Answer once for all ranks: with the sum, or the first fault."""
        planned = self._planned.get(message.number)
        if planned is None:
            return
        planned[rank] = message.digest
        if message.fault is not None:
            fault = Fault.of(message.fault.error(f"rank {rank}: "))
            message = replace(message, fault=fault)
        elif len(planned) == self.world_size:
            message = replace(message, digest=sum_of_digests(planned.values()))
        else:
            return
        del self._planned[message.number]
        self._tell_leader(message)

    def _give_credit(self) -> None:
        if self._credited or len(self._credits) < self.world_size:
            return
        slots = set(self._credits.values())
        if len(slots) != 1:
            raise ProtocolError(f"ranks offer different slots: {self._credits}")
        self._credited = True
        self._tell_leader(Credit(slots.pop()))

    def _withdraw(self, rank: int) -> None:
        if self._credited:
            self._withdrawing.add(rank)
            self._tell_leader(Withdraw())
        elif self._credits.pop(rank, None) is not None:
            self._ranks[rank].post(Withdrawn())

    def _on_arrived(self, rank: int, message: Arrived) -> None:
        if message.sequence != self._sequence:
            return
        self._arrived.add(rank)
        if len(self._arrived) == self.world_size:
            self._committed = message.sequence
            self._tell_ranks(Commit(message.sequence))
            self._tell_leader(Delivered(message.sequence))

    def _on_present(self, rank: int, message: Present) -> None:
        number = self._attendance.present(rank, message.number)
        if number is not None:
            self._tell_leader(Present(number))

    # What the leader says

    def on_leader(  # noqa: C901, PLR0915 -- as above.
        self, message: ToReplica
    ) -> None:
        """Act on what the leader says; most of it is for every rank."""
        match message:
            case FormLink():
                self._tell_ranks(replace(message, together=self._together))
            case Accepted():
                self.term = f" of term {message.term}"
                self._tell_ranks(message)
            case Layout() | RollCall():
                self._tell_ranks(message)
            case Agree():
                self._planned[message.number] = {}
                self._tell_ranks(message)
            case Expect():
                self._sequence = message.sequence
                self._credits.clear()
                self._arrived.clear()
                self._withdrawing.clear()
                self._credited = False
                self._tell_ranks(message)
            case AllPut():
                self._tell_ranks(message)
            case Discard():
                # A version that is whole stays, however late the leader gave it up.
                if message.sequence > self._committed:
                    self._sequence = 0
                    self._tell_ranks(message)
                    self._tell_leader(Discarded(message.sequence))
            case Withdrawn():
                self._on_withdrawn()
            case Ended():
                self.end(message)
            case _:
                raise ProtocolError(f"the leader sent {type(message).__name__}")

    def _on_withdrawn(self) -> None:
        self._credited = False
        for rank in self._withdrawing:
            self._credits.pop(rank, None)
            self._ranks[rank].post(Withdrawn())
        self._withdrawing.clear()
        self._give_credit()

    def _tell_ranks(self, message: object) -> None:
        for peer in self._ranks.values():
            peer.post(message)

    def _tell_leader(self, message: object) -> None:
        if self._leader is not None:
            self._leader.post(message)
