"""What the leader knows of one replica in the pool."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from weightsync.messages import Ended, Fault, FormLink
from weightsync.remembered import Remembered
from weightsync.silence import Heard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio import CancelScope

    from weightsync.agreement import Agreement
    from weightsync.fit import Fit
    from weightsync.hellos import ReplicaHello
    from weightsync.messages import Manifests
    from weightsync.peer import Peer
    from weightsync.stats import Status


class Pushed(NamedTuple):
    """What the last push did to a replica, and when."""

    version: int
    status: Status
    reason: str
    ended: float
    epoch: int


class Offer(NamedTuple):
    """A trainer rank's end of a link, and how many allocations it registers beside."""

    handle: str
    sources: int


class Replica:
    """One replica. It is ``active`` once every rank has formed its link and planned.

    ``planning`` is what they plan before that: the layout that was pushed last.

    It is ``waiting`` until it may be in the pool, and ``behind`` until it is delivered
    a version over this link. ``last`` is the highest version that a rank of it has had,
    and ``version`` the one that all of them hold. ``reopening`` says that a slot was
    taken back from it, so that it has none for a moment and is not busy.
    """

    def __init__(
        self,
        link: int,
        hello: ReplicaHello,
        held: Manifests,
        peer: Peer,
    ) -> None:
        self.link: Final = link
        self.name: Final = hello.replica
        self.mode: Final = hello.mode
        self.handles: Final = held.handles
        self.engine: Final = hello.engine
        self.segments: Final = held.segments
        self.manifests: Final = held.together.manifests
        self.peer: Final = peer
        self.heard: Final = Heard(peer)
        self.offers: dict[int, Offer] = {}
        self.ready: set[int | None] = set()
        self.waiting = False
        self.active = False
        self.planning: Agreement | None = None
        self.gone = False
        self.behind = True
        self.reopening = False
        self.credit: int | None = None
        self.sequence = 0
        self.since: Final = time.monotonic()
        self.instance: Final = hello.instance
        self.version: int | None = None
        self.epoch = 0
        self.last = hello.last
        if hello.last is not None and hello.holds:
            self.epoch, self.version = hello.last
        self.pushed: Pushed | None = None
        self.fits: Remembered[tuple[bytes, bool, bool], Fit] = Remembered()
        self.layouts: Remembered[bytes, Agreement] = Remembered()
        self.timer: CancelScope | None = None

    def form(self, trainers: Sequence[Offer], seconds: float) -> FormLink:
        """Return what forms the link with trainer ranks that offer this."""
        return FormLink(
            link=self.link,
            uuid=secrets.randbits(62),
            handles=(*[offer.handle for offer in trainers], *self.handles),
            trainers=len(trainers),
            seconds=seconds,
            mode=self.mode,
            segments=self.segments,
            sources=max([offer.sources for offer in trainers]),
        )

    def end(self, fault: Fault | None) -> None:
        """Tell it that it is out of the pool, for this reason if it did not leave."""
        self.gone = True
        self.peer.post(Ended(fault))
        self.peer.finish()

    def is_formed(self) -> None:
        """The link is formed, or never will be: forget what that took."""
        self.offers.clear()
        self.ready.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def unformed(self) -> str:
        """What has not happened yet, where it is not active."""
        if self.planning is None:
            return "its link was not formed"
        return f"no plan from {self.planning.awaited}"

    def __repr__(self) -> str:
        """Show what decides."""
        state = "gone" if self.gone else "active" if self.active else "joining"
        return f"<Replica {self.name!r} {state}, credit {self.credit}>"
