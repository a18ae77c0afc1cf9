"""What the leader tells of the members at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.membership import LastPush, Membership, ReplicaMember, TrainerMember

if TYPE_CHECKING:
    from weightsync.membership import State
    from weightsync.pool import Members
    from weightsync.replica import Pushed, Replica


def membership(members: Members, version: int, now: float) -> Membership:
    """Return who is in the job; ``version`` was delivered last, 0 where none was."""
    return Membership(
        number=members.log.number,
        world_size=members.world_size,
        version=version if version > 0 else None,
        trainers=_trainers(members, now),
        replicas={
            replica.name: _replica(replica, now)
            for replica in members.replicas.values()
        },
        epoch=members.counting.floor.epoch,
        term=members.term,
        proposal=members.admittance.in_force,
    )


def _trainers(members: Members, now: float) -> tuple[TrainerMember, ...]:
    return tuple(
        TrainerMember(
            rank,
            peer.lease,
            peer.silent,
            now - members.since[rank],
            members.quarantined[rank],
        )
        for rank, peer in sorted(members.trainers.items())
    )


def _replica(replica: Replica, now: float) -> ReplicaMember:
    push, sign = replica.pushed, replica.heard.last(now)
    return ReplicaMember(
        name=replica.name,
        ranks=len(replica.handles),
        mode=replica.mode,
        state=_state(replica),
        version=replica.version,
        push=None if push is None else _push(push, now),
        lease=sign.lease,
        silent=sign.silent,
        age=now - replica.since,
        epoch=replica.epoch,
        silent_rank=sign.rank,
    )


def _push(push: Pushed, now: float) -> LastPush:
    ago = now - push.ended
    return LastPush(push.version, push.status, push.reason, ago, push.epoch)


def _state(replica: Replica) -> State:
    if replica.waiting:
        return "waiting"
    return "active" if replica.active else "joining"
