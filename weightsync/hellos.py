"""The bodies of hellos: who connects, and what it has already. docs/protocol.md."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightsync.announcing import Count, EngineName, Slots
from weightsync.counting import Held
from weightsync.elastic import Admit, Name
from weightsync.messages import Message, Rank, Size, Text
from weightsync.vigil import DEFAULT_LEASE, LONGEST_LEASE, SHORTEST_LEASE

Lease = Annotated[float, Meta(ge=SHORTEST_LEASE, le=LONGEST_LEASE)]
"""That of the channel, for both sides."""
Incarnation = Annotated[str, Meta(max_length=256)]
"""Which start of its processes a rank belongs to; see ``incarnation``."""


class TrainerHello(Message, frozen=True):
    """A trainer rank to the leader; ``epoch``, ``replay``, ``admit`` as given."""

    rank: Rank
    world_size: Size
    lease: Lease = DEFAULT_LEASE
    epoch: Count | None = None
    incarnation: Incarnation = ""
    replay: bool = False
    admit: Admit = "all"
    engine: EngineName | None = None


class ReplicaHello(Message, frozen=True):
    """A replica of so many ``ranks``, by its rank 0, to the leader.

    What grows with the ranks follows in ``Manifests``: a hello is small. ``last`` is
    the highest version that any of its ranks has received, and ``holds`` says that all
    of them hold it now. ``instance`` is that of rank 0: it may take the place of its
    own former self.
    """

    replica: Name
    mode: Slots
    ranks: Size
    lease: Lease = DEFAULT_LEASE
    last: Held | None = None
    holds: bool = False
    instance: Incarnation = ""
    engine: EngineName = "shm"


class RankHello(Message, frozen=True):
    """A rank of a replica to its rank 0; ``last`` and ``holds`` of this rank."""

    replica: Name
    rank: Rank
    world_size: Size
    mode: Slots
    handle: Text
    lease: Lease = DEFAULT_LEASE
    last: Held | None = None
    holds: bool = False
    incarnation: Incarnation = ""
    engine: EngineName = "shm"
    segment: Count = 0


class ObserverHello(Message, frozen=True):
    """Whoever follows the membership, and takes no part in anything, to the leader."""

    lease: Lease = DEFAULT_LEASE


class Superseded(Message, frozen=True):
    """A leader or hub to the one before it: a later one has begun, of this term."""

    term: Count
