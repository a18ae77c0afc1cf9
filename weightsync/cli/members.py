"""The members of a job as text, for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightsync.membership import (
        LastPush,
        Membership,
        MembershipEvent,
        Proposal,
        ReplicaMember,
        TrainerMember,
    )

HEADS: Final = (
    "MEMBER",
    "STATE",
    "RANKS",
    "MODE",
    "VERSION",
    "LAST PUSH",
    "LAST SIGN",
    "LEASE",
    "AGE",
)
NOTHING: Final = "-"

NAME_WIDTH: Final = 40
REASON_WIDTH: Final = 60
EVENT_WIDTH: Final = 400
"""What is longer is cut; it comes from other processes, and --json has all of it."""

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def lines(
    membership: Membership, events: Iterable[MembershipEvent], name: str
) -> Iterator[str]:
    """Write who is there, and then what happened last."""
    yield _summary(membership, name)
    if membership.proposal is not None:
        yield _in_force(membership.proposal)
    yield ""
    yield from _aligned([HEADS, *_rows(membership)])
    recent = [
        f"  {_clock(event.time)}  {_plain(str(event), EVENT_WIDTH)}" for event in events
    ]
    if recent:
        yield ""
        yield from ("Events:", *recent)


def duration(seconds: float) -> str:
    """Write a duration in its largest whole units: ``4.2 s``, ``3 min 20 s``.

    Below ten seconds with one digit behind the point.
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for index, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            below = _UNITS[index + 1 :][:1]
            small = [f"{rest // s} {u}" for s, u in below if rest >= s]
            return " ".join([f"{whole} {unit}", *small])
    return NOTHING


def _summary(membership: Membership, name: str) -> str:
    joined = len(membership.trainers)
    version = membership.version
    replicas = len(membership.replicas)
    return (
        f"{name}: {joined} of {membership.world_size} trainer ranks, "
        f"{replicas} replica{'' if replicas == 1 else 's'}, "
        f"{'no version yet' if version is None else f'version {version}'}"
        f"{f' of epoch {membership.epoch}' if membership.epoch else ''}"
    )


def _in_force(proposal: Proposal) -> str:
    """Write which replicas are admitted, of those that may come."""
    if not proposal.number:
        return "no proposal yet: replicas wait until they are proposed"
    names = ", ".join(proposal.names) or "nobody"
    return _plain(f"proposal {proposal.number} in force: {names}", EVENT_WIDTH)


def _rows(membership: Membership) -> Iterator[tuple[str, ...]]:
    here = {trainer.rank: trainer for trainer in membership.trainers}
    for rank in range(membership.world_size):
        yield _trainer(rank, here.get(rank))
    for replica in membership.replicas.values():
        yield _replica(replica)


def _trainer(rank: int, trainer: TrainerMember | None) -> tuple[str, ...]:
    name = f"trainer rank {rank}"
    if trainer is None:
        return (name, "awaited", *[NOTHING] * 7)
    state = "leader" if rank == 0 else "active"
    if trainer.quarantined:
        state += f", {trainer.quarantined} quarantined"
    return (
        name,
        state,
        *[NOTHING] * 4,
        *_life(trainer),
    )


def _replica(replica: ReplicaMember) -> tuple[str, ...]:
    return (
        f"replica {_plain(replica.name, NAME_WIDTH)}",
        replica.state,
        str(replica.ranks),
        replica.mode,
        NOTHING if replica.version is None else str(replica.version),
        NOTHING if replica.push is None else _push(replica.push),
        *_life(replica, replica.silent_rank),
    )


def _push(push: LastPush) -> str:
    reason = f" ({_plain(push.reason, REASON_WIDTH)})" if push.reason else ""
    return f"{push.version} {push.status} {duration(push.ago)} ago{reason}"


def _life(member: TrainerMember | ReplicaMember, rank: int = 0) -> tuple[str, str, str]:
    if member.lease is None:
        return NOTHING, NOTHING, duration(member.age)
    sign = f"{duration(member.silent)} ago{f' (rank {rank})' if rank else ''}"
    return sign, duration(member.lease), duration(member.age)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _plain(text: str, width: int) -> str:
    """One line without control characters, which might do anything to a terminal."""
    line = "".join(each if each.isprintable() else " " for each in text)
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
