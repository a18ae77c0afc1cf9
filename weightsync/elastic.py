"""The messages of elastic pools: what is kept, who is to be in, and who is silent."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

NAME_LIMIT: Final = 256
"""Characters of the name of a replica."""

FIRST_REPLAY: Final = 1 << 61
"""Rounds are numbered by the calls of ``push``; from here on by the leader: replays."""

Name = Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]
Admit = Literal["all", "proposed"]
Keep = Literal["no", "all", "parts"]
"""Of a push, to be replayed: nothing, all of it, or into what is kept already."""


class Kept(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A trainer rank to the leader: what I pushed is copied, and can be replayed."""

    push: Annotated[int, Meta(ge=0)]


class Quiet(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A hub to the leader: this rank has been silent for longest, for so many seconds.

    Without a rank: all have given signs of life as they should.
    """

    rank: Annotated[int, Meta(ge=0)] | None = None
    silent: float = 0.0
    lease: float | None = None


class RollCall(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Leader to a replica, hub to its ranks: somebody wants your name; are you there?

    The answer is a ``Present`` with the same number or a later one.
    """

    number: Annotated[int, Meta(ge=1)]


class Present(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank to its hub, a hub for all of its ranks to the leader: I am."""

    number: Annotated[int, Meta(ge=1)]


class Propose(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A trainer rank or an observer to the leader: let these replicas be the pool.

    With no names the leader admits everybody again. The answer is a ``TellMembership``
    with the same number.
    """

    number: int
    names: Names | None


class LeftBehind(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A trainer rank to the leader: my end of a link to this replica is set apart."""

    replica: Name
    reason: str
