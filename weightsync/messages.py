"""The control messages, each direction a union of typed structs. docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from weightsync.errors import RemoteFault, WeightSyncError
from weightsync.membership import AskMembership, Happened, TellMembership
from weightsync.spec import Manifest
from weightsync.stats import PushReport
from weightsync.together import Together
from weightsync.vigil import DEFAULT_LEASE, LONGEST_LEASE, SHORTEST_LEASE

MAX_RANKS: Final = 4096
"""Limit of trainer ranks and of ranks of one replica; also in csrc/shm/control.h."""

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
OnBusy = Literal["wait", "skip"]
Require = Literal["any", "all"]
Slots = Literal["staged", "swap", "inplace"]
Lease = Annotated[float, Meta(ge=SHORTEST_LEASE, le=LONGEST_LEASE)]


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
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


# Hello bodies; the lease is that of the channel, for both sides


class TrainerHello(_Message, frozen=True):
    """A trainer rank to the leader."""

    rank: Rank
    world_size: Size
    lease: Lease = DEFAULT_LEASE


class ReplicaHello(_Message, frozen=True):
    """A replica, by its rank 0, to the leader. Manifests and handles by rank."""

    replica: Name
    mode: Slots
    handles: tuple[Text, ...]
    lease: Lease = DEFAULT_LEASE


class RankHello(_Message, frozen=True):
    """A rank of a replica to its rank 0."""

    replica: Name
    rank: Rank
    world_size: Size
    mode: Slots
    handle: Text
    lease: Lease = DEFAULT_LEASE


class ObserverHello(_Message, frozen=True):
    """Whoever follows the membership, and takes no part in anything, to the leader."""

    lease: Lease = DEFAULT_LEASE


# Links


class Manifests(_Message, frozen=True):
    """The manifests of a replica, by rank; follows its hello."""

    together: Together


class Accepted(_Message, frozen=True):
    """The hello was accepted."""


class Ended(_Message, frozen=True):
    """The last message; clean without a fault. ``untold``: a version may come after."""

    fault: Fault | None = None
    untold: bool = False


class OfferLink(_Message, frozen=True):
    """Leader to trainer ranks: prepare a process group for this replica."""

    link: Count
    replica: Name


class LinkOffered(_Message, frozen=True):
    """The handle of the process group that was prepared."""

    link: Count
    handle: Text


class FormLink(_Message, frozen=True, dict=True):
    """Form the link: trainer ranks first, then the ranks of the replica."""

    link: Count
    uuid: Count
    handles: tuple[Text, ...]
    trainers: Size
    seconds: float
    together: Together = Together()
    mode: Slots = "staged"

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Those of the ranks of the replica; the leader tells trainer ranks."""
        return self.together.manifests


class LinkReady(_Message, frozen=True):
    """This side of the link is formed."""

    link: Count


class LinkFailed(_Message, frozen=True):
    """This side of the link cannot be formed, or broke."""

    link: Count
    fault: Fault


class DropLink(_Message, frozen=True):
    """Leader to trainer ranks: tear this side of the link down."""

    link: Count
    reason: Text


class Pool(_Message, frozen=True):
    """Leader to trainer ranks: the replicas that the next push goes to."""

    replicas: tuple[Name, ...]


# Pushes


class Layout(_Message, frozen=True, dict=True):
    """The manifests of all trainer ranks for a push, sent once for each layout."""

    digest: Digest
    together: Together

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Those of the trainer ranks."""
        return self.together.manifests


class Agree(_Message, frozen=True):
    """Leader to all ranks of a link: plan your own part of a layout."""

    link: Count
    number: Count
    layout: Digest


class Agreed(_Message, frozen=True):
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


class PushRequest(_Message, frozen=True):
    """A trainer rank has called ``push`` for the ``push``-th time."""

    push: Count
    terms: Terms
    timeout: float
    digest: Digest
    manifest: Manifest | None
    fault: Fault | None = None


class PushCancel(_Message, frozen=True):
    """A trainer rank was cancelled in its ``push``-th push."""

    push: Count


class Verify(_Message, frozen=True):
    """Leader to a trainer rank: digest the bytes of these pieces of its manifest."""

    push: Count
    pieces: tuple[Count, ...]


class Verified(_Message, frozen=True):
    """The digests, in the order in which they were asked for."""

    push: Count
    digests: tuple[Digest, ...]
    fault: Fault | None = None


class Put(_Message, frozen=True):
    """Leader to trainer ranks: put this version into a slot of a replica."""

    push: Count
    link: Count
    sequence: Count
    slot: Annotated[int, Meta(ge=0, le=1)]
    version: int
    layout: Digest


class PutEnded(_Message, frozen=True):
    """A trainer rank puts no more; ``signals`` it sent to each rank of the replica."""

    link: Count
    sequence: Count
    signals: tuple[Count, ...]
    fault: Fault | None = None


class Stop(_Message, frozen=True):
    """Leader to trainer ranks: stop putting and say how far you came."""

    link: Count
    sequence: Count


class PushEnded(_Message, frozen=True):
    """Leader to trainer ranks: the outcome of a push."""

    push: Count
    report: PushReport | None
    fault: Fault | None = None


# Replicas


class Credit(_Message, frozen=True):
    """This slot may be put into, once."""

    slot: Annotated[int, Meta(ge=0, le=1)]


class Withdraw(_Message, frozen=True):
    """The credit given last is taken back, if it was not used."""


class Withdrawn(_Message, frozen=True):
    """It was not used."""


class Expect(_Message, frozen=True):
    """Leader to a replica: the credit is used for this version."""

    sequence: Count
    version: int
    layout: Digest


class Arrived(_Message, frozen=True):
    """A rank of a replica has everything of a version."""

    sequence: Count


class Commit(_Message, frozen=True):
    """Every rank of the replica has everything: the version is whole."""

    sequence: Count


class Delivered(_Message, frozen=True):
    """A replica to the leader: the version is whole."""

    sequence: Count


class Discard(_Message, frozen=True):
    """Leader to a replica: take these signals and forget the version.

    ``signals[g][t]`` were sent by trainer rank t to rank g.
    """

    sequence: Count
    signals: tuple[tuple[Count, ...], ...]


class Discarded(_Message, frozen=True):
    """A replica to the leader: the version is forgotten, and will not be committed."""

    sequence: Count


class Leaving(_Message, frozen=True):
    """The sender leaves; nothing is wrong."""


FromTrainer = (
    PushRequest
    | PushCancel
    | Verified
    | PutEnded
    | Agreed
    | LinkOffered
    | LinkReady
    | LinkFailed
    | AskMembership
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
    | Leaving
)
ToReplica = Accepted | Ended | FormLink | Layout | Agree | Expect | Discard | Withdrawn
FromRank = (
    Manifests | LinkReady | LinkFailed | Agreed | Credit | Withdraw | Arrived | Leaving
)
ToRank = ToReplica | Commit
FromObserver = AskMembership | Leaving
ToObserver = Accepted | Ended | Happened | TellMembership
