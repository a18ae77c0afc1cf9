"""The pool, as the leader sees it: trainer ranks, replicas, and the links between.

The leader is trainer rank 0. A replica that joins is linked to all trainer ranks before
the next push goes to it; one that fails is dropped and concerns no other. Nothing here
waits: methods take what happened and post what follows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from weightsync.admittance import Admittance
from weightsync.agreement import Agreement
from weightsync.counting import Counting
from weightsync.errors import (
    FencedError,
    OtherStartError,
    PeerError,
    PlanError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.membership import EventLog, Happened
from weightsync.messages import (
    Accepted,
    Agree,
    Agreed,
    DropLink,
    Ended,
    Fault,
    Layout,
    OfferLink,
    Pool,
)
from weightsync.remembered import Remembered
from weightsync.replica import Offer, Replica
from weightsync.succession import Succession
from weightsync.together import Together
from weightsync.watching import Watcher

if TYPE_CHECKING:
    from anyio import CancelScope

    from weightsync.hellos import ReplicaHello
    from weightsync.membership import Kind, Role
    from weightsync.messages import Expect, Manifests, Put
    from weightsync.peer import Peer

After = Callable[[float, Callable[[], None]], "CancelScope"]
"""Calls back after some seconds, unless the scope that it returns is cancelled."""

Assure = Callable[[Callable[[], None]], None]
"""Calls back when it is known that no other trainers have taken over the job."""

MAX_OBSERVERS: Final = 64
"""Each costs the leader a message for each event."""
SUSPECT_SECONDS: Final = 1.0
"""How long a replica that a trainer rank has lost may take to say itself what it is."""

FORM_SECONDS: Final = 300.0
"""Limit for forming a link: mapping a large window takes about 0.4 s a GiB."""


class Members:
    """Trainer ranks and replicas, and what each has been told."""

    def __init__(self, world_size: int, after: After, epoch: int | None = None) -> None:
        self.world_size: Final = world_size
        self.epoch: Final = epoch
        self.counting: Final = Counting(epoch)
        self.term = 0
        self.assure: Assure = _at_once
        self.trainers: dict[int, Peer] = {}
        self.replicas: dict[int, Replica] = {}
        self.error: WeightSyncError | None = None
        self.watcher = Watcher()
        self.succession: Final = Succession(self._arrive)
        self.admittance = Admittance()
        self.observers: set[Peer] = set()
        self.log: Final = EventLog()
        self.since: dict[int, float] = {}
        self.quarantined: Counter[int] = Counter()
        self._after = after
        self._links = 0
        self._agreements = 0
        self._known: dict[int, Remembered[bytes, None]] = {}

    # Trainer ranks

    def trainer_joined(self, rank: int, world_size: int, peer: Peer) -> None:
        """Admit a trainer rank, or raise PlanError for a wrong rank or world size."""
        if world_size != self.world_size or rank >= self.world_size:
            message = (
                f"trainer rank {rank} of {world_size} does not fit: rank 0 was started "
                f"with world_size={self.world_size}"
            )
            raise PlanError(message)
        if rank in self.trainers:
            raise OtherStartError(f"there is a trainer rank {rank} already")
        self._check()
        self.trainers[rank] = peer
        self.since[rank] = time.monotonic()
        self._known[rank] = Remembered()
        # Before it is accepted: to its caller all of this has happened.
        peer.post(Happened(tuple(self.log)))
        self._announce("joined", "trainer", str(rank))
        peer.post(Accepted(self.term))
        peer.post(self._pool())
        for replica in self.replicas.values():
            if not replica.waiting:
                peer.post(OfferLink(replica.link, replica.name, replica.engine))

    def trainer_lost(self, rank: int, error: WeightSyncError, *, clean: bool) -> None:
        """Without one trainer rank no version can be whole again: end everything."""
        self.trainers.pop(rank, None)
        what = "left" if clean else f"failed: {error}"
        reason = "" if clean else str(error)
        self._announce("left" if clean else "failed", "trainer", str(rank), reason)
        self.fail(PeerError(f"trainer rank {rank} {what}"), clean=clean)

    def fail(self, error: WeightSyncError, *, clean: bool = False) -> None:
        """End the pool for this reason; replicas keep the version they have."""
        if self.error is not None:
            return
        self.error = error
        if isinstance(error, FencedError):
            self._announce("fenced", "trainer", "0", str(error))
        self.watcher.failed(error)
        fault = None if clean else Fault.of(error)
        self.succession.end(fault)
        for replica in list(self.replicas.values()):
            self._remove(replica)
            replica.end(fault)
        if fault is not None:
            # Whatever they wait for will not come.
            for peer in (*self.trainers.values(), *self.observers):
                peer.post(Ended(fault))

    # Replicas

    def replica_joined(
        self, hello: ReplicaHello, held: Manifests, peer: Peer
    ) -> Replica:
        """Take a replica in, or raise PlanError. It is linked once it is admitted.

        Where its name is taken it waits for that: ``Succession``.
        """
        self._check()
        self._links += 1
        replica = Replica(self._links, hello, held, peer)
        self._arrive(replica)
        return replica

    def _arrive(self, replica: Replica) -> None:
        named = (r for r in self.replicas.values() if r.name == replica.name)
        owner = next(named, None)
        if owner is not None and owner.instance != (replica.instance or None):
            self.succession.wait(replica, owner)
            return
        try:
            self.counting.joined(replica.name, replica.last)
        except PlanError as error:
            self._announce("failed", "replica", replica.name, str(error))
            raise
        if owner is not None:  # it comes back before its end was noticed
            self.succession.present(owner)
            self.drop(owner, PeerError("it joins again"))
        self.replicas[replica.link] = replica
        replica.peer.post(Accepted(self.term))
        if self.admittance.admits(replica.name):
            self._admit(replica)
        else:
            replica.waiting = True
            self._announce("waiting", "replica", replica.name)

    def propose(self, names: tuple[str, ...] | None) -> None:
        """Let the pool be these replicas, or (None) all; PlanError for wrong names."""
        if self.error is not None:
            return  # it is over, and everybody was told
        number = self.admittance.propose(names)
        for replica in list(self.replicas.values()):
            if self.admittance.admits(replica.name):
                if replica.waiting:
                    self._admit(replica)
            elif not replica.waiting:
                error = PeerError(f"proposal {number} does not name it")
                self.drop(replica, error, clean=True, wanted=False)

    def _admit(self, replica: Replica) -> None:
        """Begin to form the link."""
        replica.waiting = False
        self.tell_trainers(OfferLink(replica.link, replica.name, replica.engine))

    def offered(self, rank: int, link: int, handle: str, sources: int = 0) -> None:
        """A trainer rank has prepared its end; form the link when all have."""
        replica = self.replicas.get(link)
        if replica is None:
            return
        replica.offers[rank] = Offer(handle, sources)
        if len(replica.offers) == self.world_size:
            self._form(replica)

    def linked(self, rank: int | None, link: int) -> None:
        """A trainer rank, or all ranks of the replica (None), formed the link."""
        replica = self.replicas.get(link)
        if replica is None:
            return
        replica.ready.add(rank)
        if len(replica.ready) == self.world_size + 1:
            replica.planning = self.watcher.formed(replica)
            if replica.planning is None or replica.planning.complete:
                self._activate(replica)

    def _activate(self, replica: Replica) -> None:
        replica.active, replica.planning = True, None
        replica.is_formed()
        self._announce("joined", "replica", replica.name)
        self._tell_pool()
        self.watcher.joined(replica)

    def tell(self, kind: Kind, replica: str, reason: str) -> None:
        """Tell everybody what there is to know of a replica, in the pool or not."""
        self._announce(kind, "replica", replica, reason)

    def credited(self, replica: Replica, slot: int) -> None:
        """A replica opened a slot."""
        replica.credit, replica.reopening = slot, False
        self.watcher.ready(replica)

    def drop(
        self,
        replica: Replica,
        error: WeightSyncError,
        *,
        clean: bool = False,
        wanted: bool = True,
    ) -> None:
        """Take a replica out of the pool and tear its link down, everywhere.

        ``clean`` says that nothing is wrong with it; if that is not what it ``wanted``
        itself, it is told why.
        """
        if replica.gone or self.succession.leaves(replica):
            return
        self._remove(replica)
        fault = None
        if not (clean and wanted):
            message = f"replica {replica.name!r} was removed from the pool: {error}"
            fault = Fault.of(PeerError(message))
        replica.end(fault)
        reason = "" if clean and wanted else str(error)
        kind: Kind = "left" if clean else "failed"
        self._announce(kind, "replica", replica.name, reason)
        self._tell_pool()  # first: whose push ends by this sees the pool as it is
        self.watcher.dropped(replica, error, clean=clean)
        self.succession.out(replica)

    def suspect(
        self, replica: Replica, rank: int, fault: Fault, what: str = ""
    ) -> None:
        """Drop a replica that a trainer rank has trouble with.

        Memory is faster than a channel: a rank whose window is gone may have left, and
        its word for that be on the way. The replica knows best why, and says so first.
        """
        error = fault.error(f"{what}trainer rank {rank}: ")
        if isinstance(error, PeerError):
            self._after(SUSPECT_SECONDS, lambda: self.drop(replica, error))
        else:
            self.drop(replica, error)

    @property
    def active(self) -> list[Replica]:
        """The replicas that a push goes to, in the order in which they joined."""
        return [replica for replica in self.replicas.values() if replica.active]

    # Observers

    def observer_joined(self, peer: Peer) -> None:
        """Let somebody follow who takes no part; PeerError where there are too many."""
        self._check()
        if len(self.observers) >= MAX_OBSERVERS:
            raise PeerError(f"there are {MAX_OBSERVERS} observers already")
        self.observers.add(peer)
        peer.post(Happened(tuple(self.log)))
        peer.post(Accepted())

    def _announce(self, kind: Kind, role: Role, name: str, reason: str = "") -> None:
        """Tell everybody who follows, all of them the same in the same order."""
        happened = Happened((self.log.add(kind, role, name, reason),))
        for peer in (*self.trainers.values(), *self.observers):
            peer.post(happened)

    # Layouts

    def agreement(self, replica: Replica, layout: Layout) -> Agreement:
        """Whether all ranks of a link plan a layout alike; asks where that is new.

        Layouts are used in the order of the messages that name them, so both ends of
        each channel remember the same ones. A plan lasts as long as its layout: where
        that was forgotten, everybody is asked again.
        """
        found = replica.layouts.get(layout.digest)
        known = all(layout.digest in known for known in self._known.values())
        if found is None or not known:
            found = self._ask(replica, layout)
        return found

    def _ask(self, replica: Replica, layout: Layout) -> Agreement:
        digest = layout.digest
        self._agreements += 1
        agreement = Agreement(self._agreements, self.world_size)
        if digest not in replica.layouts:
            replica.layouts.put(digest, agreement)
            replica.peer.post(layout)
        replica.layouts[digest] = agreement
        for rank, peer in self.trainers.items():
            if digest not in self._known[rank]:
                self._known[rank].put(digest, None)
                peer.post(layout)
        ask = Agree(replica.link, agreement.number, digest)
        replica.peer.post(ask)
        self.tell_trainers(ask)
        return agreement

    def agreed(self, replica: Replica, rank: int | None, message: Agreed) -> None:
        """A trainer rank, or all ranks of the replica (None), planned a layout."""
        known = replica.layouts.values()
        agreement = next((a for a in known if a.number == message.number), None)
        if agreement is None:
            return  # forgotten meanwhile
        if message.fault is not None:
            what = "it cannot be planned for: "
            if rank is None:
                self.drop(replica, message.fault.error(what))
            else:
                self.suspect(replica, rank, message.fault, what)
            return
        agreement.answer(rank, message.digest)
        difference = agreement.difference
        if difference is not None:
            self.drop(replica, ProtocolError(difference))
        elif agreement.complete and agreement is replica.planning:
            self._activate(replica)
        elif agreement.complete:
            self.watcher.ready(replica)

    def move(self, replica: Replica, expect: Expect, put: Put) -> None:
        """Let a version go to a replica; the layout was agreed."""
        replica.layouts.use(put.layout)
        replica.peer.post(expect)
        for known in self._known.values():
            known.use(put.layout)
        self.tell_trainers(put)

    def tell_trainers(self, message: object) -> None:
        """Post to every trainer rank."""
        for peer in self.trainers.values():
            peer.post(message)

    def _form(self, replica: Replica) -> None:
        offers = [replica.offers[rank] for rank in range(self.world_size)]
        form = replica.form(offers, FORM_SECONDS)
        replica.peer.post(form)
        together = Together.of(replica.manifests)
        self.tell_trainers(replace(form, together=together))

        def expire() -> None:
            if not replica.active:
                why = f"{replica.unformed} in {FORM_SECONDS:.0f} s"
                self.drop(replica, TimedOutError(why))

        replica.timer = self._after(FORM_SECONDS, expire)

    def _remove(self, replica: Replica) -> None:
        replica.gone, replica.active, replica.credit = True, False, None
        replica.is_formed()
        self.replicas.pop(replica.link, None)
        self.tell_trainers(DropLink(replica.link, "the replica left the pool"))

    def _pool(self) -> Pool:
        return Pool(tuple([replica.name for replica in self.active]))

    def _tell_pool(self) -> None:
        self.tell_trainers(self._pool())

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def _at_once(act: Callable[[], None]) -> None:
    """Nobody can take over a job whose store is this leader's own."""
    act()
