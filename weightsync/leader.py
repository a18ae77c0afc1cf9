"""The leader: what trainer rank 0 does for everybody, over the control channels.

It accepts trainer ranks and replicas, hands what they say to ``Members`` and
``Pushes``, and notices when one is gone.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import anyio
import msgspec

from weightsync.admission import admitting, check_alike, converse, manifests
from weightsync.admittance import Admittance
from weightsync.elastic import Kept, LeftBehind, Present, Propose, Quiet
from weightsync.engines import OneEngine
from weightsync.errors import ClosedError, PeerError, ProtocolError, WeightSyncError
from weightsync.fencing import check_incarnation
from weightsync.hellos import ObserverHello, ReplicaHello, Superseded, TrainerHello
from weightsync.membership import AskMembership, TellMembership
from weightsync.messages import (
    Agreed,
    Credit,
    Delivered,
    Discarded,
    Ended,
    FromObserver,
    FromReplica,
    FromTrainer,
    Leaving,
    LinkFailed,
    LinkOffered,
    LinkReady,
    Manifests,
    PushCancel,
    PushRequest,
    PutEnded,
    Verified,
    Withdraw,
    Withdrawn,
)
from weightsync.peer import Conversations, MessageStream, Peer
from weightsync.pool import Members
from weightsync.push import Pushes
from weightsync.roster import membership

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.errors import FencedError
    from weightsync.fencing import Fence
    from weightsync.replica import Replica
    from weightsync.runtime import Tasks

Hello = TrainerHello | ReplicaHello | ObserverHello | Superseded
Incoming = FromTrainer | FromReplica | FromObserver

_hellos: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


OBSERVER_QUEUED: Final = 256
"""An observer that has not read so many messages is dropped."""


class Leader:
    """Lives in the loop of trainer rank 0, whose ``mine`` is the measure of all.

    ``tasks`` must outlive it.
    """

    def __init__(self, mine: TrainerHello, tasks: Tasks, fence: Fence) -> None:
        self._tasks = tasks
        self._mine = mine
        self._fence = fence
        self._conversations = Conversations()
        self.members = Members(mine.world_size, self._after, mine.epoch)
        self.members.term = fence.term
        self.members.admittance = Admittance(mine.admit)
        if fence.store is not None:
            self.members.assure = self._assure
        self.pushes = Pushes(self.members, self._after, replay=mine.replay)
        self._engines = OneEngine(self.members.replicas)

    async def attend(self, hello: bytes, stream: MessageStream) -> None:
        """Converse with whoever has connected, until the end."""
        try:
            body = _hellos.decode(hello)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{stream.peer} sent no hello of ours") from error
        if isinstance(body, TrainerHello):
            stream.peer = f"trainer rank {body.rank}"
            await self._attend_trainer(body, stream)
        elif isinstance(body, ReplicaHello):
            stream.peer = f"replica {body.replica!r}"
            await self._attend_replica(body, stream)
        elif isinstance(body, Superseded):
            self._end_term(self._fence.passed(body.term))
        else:
            stream.peer = f"the observer at {stream.peer}"
            await self._attend_observer(body, stream)

    async def attend_quietly(self, hello: bytes, stream: MessageStream) -> None:
        """``attend`` for a party of this process, whose end is told by its stream."""
        try:
            await self.attend(hello, stream)
        except WeightSyncError:
            await stream.aclose()

    async def close(self) -> None:
        """Tell everybody that this was the end, and see it sent."""
        self.members.fail(ClosedError("the trainer closed"), clean=True)
        for peer in (*self.members.trainers.values(), *self.members.observers):
            peer.post(Ended())
            peer.finish()
        await self._conversations.flush()
        self._fence.store = None

    # Trainer ranks

    async def _attend_trainer(self, hello: TrainerHello, stream: MessageStream) -> None:
        peer = Peer(stream, lease=hello.lease)
        async with admitting(peer, stream):
            check_alike(hello, self._mine)
            check_incarnation(
                f"trainer rank {hello.rank}", hello.incarnation, "trainer rank 0"
            )
            self._engines.trainer(hello.rank, hello.engine)
            self.members.trainer_joined(hello.rank, hello.world_size, peer)
        handle = partial(self._on_trainer, hello.rank)
        end = await converse(self._conversations, peer, handle)
        if not end.left:
            await self._look()
        self.members.trainer_lost(hello.rank, end.error, clean=end.left)

    def _on_trainer(  # noqa: C901, PLR0912 -- one case a message.
        self, rank: int, message: FromTrainer
    ) -> None:
        match message:
            case PushRequest():
                self.pushes.request(rank, message)
            case PushCancel():
                self.pushes.cancel(rank, message.push)
            case Verified():
                self.pushes.verified(rank, message)
            case PutEnded():
                self.pushes.put_ended(rank, message)
            case Kept():
                self.pushes.kept(rank, message)
            case Agreed():
                self._agreed(rank, message)
            case LinkOffered():
                offer = message.handle, message.sources
                self.members.offered(rank, message.link, *offer)
            case LinkReady():
                self.members.linked(rank, message.link)
            case LinkFailed():
                self._link_failed(rank, message)
            case LeftBehind():
                self.members.quarantined[rank] += 1
                reason = f"trainer rank {rank}: {message.reason}"
                self.members.tell("quarantined", message.replica, reason)
            case AskMembership() | Propose():
                self._tell_membership(self.members.trainers[rank], message)
            case Leaving():
                self.members.trainers[rank].finish()
            case _:
                raise ProtocolError(
                    f"trainer rank {rank} sent {type(message).__name__}"
                )

    # Replicas

    async def _attend_replica(self, hello: ReplicaHello, stream: MessageStream) -> None:
        peer = Peer(stream, lease=hello.lease)
        async with admitting(peer, stream):
            self._engines.replica(hello.replica, hello.engine)
            held = await manifests(stream, hello.ranks, hello.ranks)
            replica = self.members.replica_joined(hello, held, peer)
        handle = partial(self._on_replica, replica)
        end = await converse(self._conversations, peer, handle)
        reason = "it left" if end.left else str(end.error)
        if not end.left:
            await self._look()
        self.members.drop(replica, PeerError(reason), clean=end.left)

    def _on_replica(  # noqa: C901, PLR0912 -- one case a message.
        self, replica: Replica, message: FromReplica
    ) -> None:
        match message:
            case LinkReady():
                self.members.linked(None, message.link)
            case LinkFailed():
                self.members.drop(replica, PeerError(message.fault.message))
            case Agreed():
                self.members.agreed(replica, None, message)
            case Credit():
                self.members.credited(replica, message.slot)
            case Withdraw():
                if replica.credit is not None:
                    replica.credit = None
                    replica.peer.post(Withdrawn())
            case Delivered():
                self.pushes.delivered(replica, message.sequence)
            case Discarded():
                self.pushes.discarded(replica, message.sequence)
            case Quiet():
                replica.heard.tell(message, time.monotonic())
            case Present():
                self.members.succession.present(replica, message.number)
            case Leaving():
                self.members.drop(replica, PeerError("it left"), clean=True)
            case Manifests():
                raise ProtocolError(f"{replica.peer.name} sent its manifests again")
            case _:
                assert_never(message)

    # Observers

    async def _attend_observer(
        self, hello: ObserverHello, stream: MessageStream
    ) -> None:
        peer = Peer(stream, lease=hello.lease, queued=OBSERVER_QUEUED)
        async with admitting(peer, stream):
            self.members.observer_joined(peer)

        def handle(message: FromObserver) -> None:
            match message:
                case AskMembership() | Propose():
                    self._tell_membership(peer, message)
                case Leaving():
                    peer.finish()
                case _:
                    raise ProtocolError(f"{peer.name} sent {type(message).__name__}")

        try:
            await self._conversations.hold(peer, handle)
        finally:
            self.members.observers.discard(peer)

    # Terms

    def _assure(self, act: Callable[[], None]) -> None:
        async def look() -> None:
            await self._look()
            act()

        self._tasks.start_soon(look)

    async def _look(self) -> None:
        """Something broke: was it because other trainers took over?"""
        if self.members.error is None:
            self._end_term(await self._fence.look())

    def _end_term(self, error: FencedError | None) -> None:
        if error is not None:
            self.members.fail(error)

    def _tell_membership(self, peer: Peer, asked: AskMembership | Propose) -> None:
        """Answer, after what is proposed is done."""
        if isinstance(asked, Propose):
            self.members.propose(asked.names)
        now = time.monotonic()
        found = membership(self.members, self.pushes.last_version, now)
        peer.post(TellMembership(asked.number, found))

    def _link_failed(self, rank: int, message: LinkFailed) -> None:
        replica = self.members.replicas.get(message.link)
        if replica is not None:
            self.members.suspect(replica, rank, message.fault)

    def _agreed(self, rank: int, message: Agreed) -> None:
        replica = self.members.replicas.get(message.link)
        if replica is not None:
            self.members.agreed(replica, rank, message)

    def _after(self, seconds: float, act: Callable[[], None]) -> anyio.CancelScope:
        scope = anyio.CancelScope()

        async def wait() -> None:
            with scope:
                await anyio.sleep(seconds)
                act()

        self._tasks.start_soon(wait)
        return scope
