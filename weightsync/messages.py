"""The control messages, each direction a union of typed structs. docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from weightsync.announcing import AllPut, Count, EngineName, Slots, Sources
from weightsync.elastic import (
    Keep,
    Kept,
    LeftBehind,
    Name,
    Present,
    Propose,
    Quiet,
    RollCall,
)
from weightsync.errors import RemoteFault, WeightSyncError
from weightsync.membership import AskMembership, Happened, TellMembership
from weightsync.spec import Manifest
from weightsync.stats import PushReport
from weightsync.together import Together

MAX_RANKS: Final = 4096
"""Limit of trainer ranks and of ranks of one replica; also in csrc/shm/control.h."""

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
OnBusy = Literal["wait", "skip"]
Require = Literal["any", "all"]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that is sent: immutable, tagged with its class name."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error on its way: class name and message."""

    kind: Text
    message: Text

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Take an error apart."""
        kind, message = RemoteFault.encode(error)
        return cls(kind, message[: 1 << 16])

    def error(self, prefix: str = "") -> WeightSyncError:
        """Put it together again."""
        return RemoteFault.decode(self.kind, prefix + self.message)


# Links


class Manifests(Message, frozen=True):
    """The manifests of a replica, and its handles, by rank; follows its hello.

    ``segments`` are the most bytes of a segment of each rank's window, 0 where it is in
    one. Those of one rank: its hello has handle and segment.
    """

    together: Together
    handles: tuple[Text, ...] = ()
    segments: tuple[Count, ...] = ()


class Accepted(Message, frozen=True):
    """The hello was accepted; by the leader of this term."""

    term: Count = 0


class Ended(Message, frozen=True):
    """The last message; clean without a fault. ``untold``: a version may come after."""

    fault: Fault | None = None
    untold: bool = False


class OfferLink(Message, frozen=True, dict=True):
    """Leader to trainer ranks: prepare a process group for this replica."""

    link: Count
    replica: Name
    engine: EngineName = "shm"


class LinkOffered(Message, frozen=True):
    """The handle of what was prepared; ``sources``: allocations of the rank beside."""

    link: Count
    handle: Text
    sources: Sources = 0


class FormLink(Message, frozen=True, dict=True):
    """Form the link: trainer ranks first, then the ranks of the replica.

    ``sources`` is the most that one of the trainer ranks has.
    """

    link: Count
    uuid: Count
    handles: tuple[Text, ...]
    trainers: Size
    seconds: float
    together: Together = Together()
    mode: Slots = "staged"
    segments: tuple[Count, ...] = ()
    sources: Sources = 0

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Those of the ranks of the replica; the leader tells trainer ranks."""
        return self.together.manifests


class LinkReady(Message, frozen=True):
    """This side of the link is formed."""

    link: Count


class LinkFailed(Message, frozen=True):
    """This side of the link cannot be formed, or broke."""

    link: Count
    fault: Fault


class DropLink(Message, frozen=True, dict=True):
    """Leader to trainer ranks: tear this side of the link down."""

    link: Count
    reason: Text


class Pool(Message, frozen=True, dict=True):
    """Leader to trainer ranks: the replicas that the next push goes to."""

    replicas: tuple[Name, ...]


# Pushes


class Layout(Message, frozen=True, dict=True):
    """The manifests of all trainer ranks for a push, sent once for each layout."""

    digest: Digest
    together: Together

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Those of the trainer ranks."""
        return self.together.manifests


class Agree(Message, frozen=True, dict=True):
    """Leader to all ranks of a link: plan your own part of a layout."""

    link: Count
    number: Count
    layout: Digest


class Agreed(Message, frozen=True):
    """The digest of what was planned, or why nothing was.

    A replica answers once, with the sum of the digests of its ranks.
    """

    link: Count
    number: Count
    digest: Digest
    fault: Fault | None = None


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all trainer ranks must call one push with alike."""

    version: int | None = None
    partial: bool = False
    on_busy: OnBusy = "wait"
    require: Require = "any"
    cast: bool = False
    check_replicas: bool = False


class PushRequest(Message, frozen=True):
    """A trainer rank has called ``push`` for the ``push``-th time."""

    push: Count
    terms: Terms
    timeout: float
    digest: Digest
    manifest: Manifest | None
    fault: Fault | None = None


class PushCancel(Message, frozen=True):
    """A trainer rank was cancelled in its ``push``-th push."""

    push: Count


class Verify(Message, frozen=True):
    """Leader to a trainer rank: digest the bytes of these pieces of its manifest."""

    push: Count
    pieces: tuple[Count, ...]


class Verified(Message, frozen=True):
    """The digests, in the order in which they were asked for."""

    push: Count
    digests: tuple[Digest, ...]
    fault: Fault | None = None


class Put(Message, frozen=True, dict=True):
    """Leader to trainer ranks: put this version into a slot of a replica."""

    push: Count
    link: Count
    sequence: Count
    slot: Annotated[int, Meta(ge=0, le=1)]
    version: int
    layout: Digest


class PutEnded(Message, frozen=True):
    """A trainer rank puts no more; ``signals`` it sent to each rank of the replica."""

    link: Count
    sequence: Count
    signals: tuple[Count, ...]
    fault: Fault | None = None


class Stop(Message, frozen=True, dict=True):
    """Leader to trainer ranks: stop putting and say how far you came."""

    link: Count
    sequence: Count


class PushEnded(Message, frozen=True, dict=True):
    """Leader to trainer ranks: the outcome of a push, and what to keep of it."""

    push: Count
    report: PushReport | None
    fault: Fault | None = None
    keep: Keep = "no"


# Replicas


class Credit(Message, frozen=True):
    """This slot may be put into, once."""

    slot: Annotated[int, Meta(ge=0, le=1)]


class Withdraw(Message, frozen=True):
    """The credit given last is taken back, if it was not used."""


class Withdrawn(Message, frozen=True):
    """It was not used."""


class Expect(Message, frozen=True):
    """Leader to a replica: the credit is used for this version."""

    sequence: Count
    version: int
    layout: Digest
    epoch: Count = 0


class Arrived(Message, frozen=True):
    """A rank of a replica has everything of a version."""

    sequence: Count


class Commit(Message, frozen=True):
    """Every rank of the replica has everything: the version is whole."""

    sequence: Count


class Delivered(Message, frozen=True):
    """A replica to the leader: the version is whole."""

    sequence: Count


class Discard(Message, frozen=True):
    """Leader to a replica: take these signals and forget the version.

    ``signals[g][t]`` were sent by trainer rank t to rank g.
    """

    sequence: Count
    signals: tuple[tuple[Count, ...], ...]


class Discarded(Message, frozen=True):
    """A replica to the leader: the version is forgotten, and will not be committed."""

    sequence: Count


class Leaving(Message, frozen=True):
    """The sender leaves; nothing is wrong."""


FromTrainer = (
    PushRequest
    | PushCancel
    | Verified
    | PutEnded
    | Kept
    | Agreed
    | LinkOffered
    | LinkReady
    | LinkFailed
    | LeftBehind
    | AskMembership
    | Propose
    | Leaving
)
ToTrainer = (
    Accepted
    | Ended
    | OfferLink
    | FormLink
    | DropLink
    | Pool
    | Happened
    | TellMembership
    | Layout
    | Agree
    | Verify
    | Put
    | Stop
    | PushEnded
)
FromReplica = (
    Manifests
    | LinkReady
    | LinkFailed
    | Agreed
    | Credit
    | Withdraw
    | Delivered
    | Discarded
    | Quiet
    | Present
    | Leaving
)
ToReplica = (
    Accepted
    | Ended
    | FormLink
    | Layout
    | Agree
    | Expect
    | AllPut
    | Discard
    | Withdrawn
    | RollCall
)
FromRank = (
    Manifests
    | LinkReady
    | LinkFailed
    | Agreed
    | Credit
    | Withdraw
    | Arrived
    | Present
    | Leaving
)
ToRank = ToReplica | Commit
FromObserver = AskMembership | Propose | Leaving
ToObserver = Accepted | Ended | Happened | TellMembership
