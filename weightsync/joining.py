"""One time that a generator rank joins: its channels, its link, on rank 0 the hub."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from weightsync.admission import admitting, converse, manifests
from weightsync.errors import (
    OtherStartError,
    PeerError,
    PlanError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.fencing import incarnation, supersede
from weightsync.generator import GeneratorRank
from weightsync.hellos import RankHello, Superseded
from weightsync.hub import Hub
from weightsync.link import GeneratorLink
from weightsync.messages import Ended, Fault, FromRank, Manifests, ToRank, ToReplica
from weightsync.peer import MessageStream, Peer, local_pair
from weightsync.runtime import in_thread, in_thread_for
from weightsync.session import LEADER, PAUSE_SECONDS, Session, listener_before
from weightsync.store import FileAddress
from weightsync.together import Together
from weightsync.vigil import BEATS

if TYPE_CHECKING:
    from weightsync.channel import Endpoint
    from weightsync.member import Member
    from weightsync.place import Place
    from weightsync.runtime import OwnTasks

_encode: Final = msgspec.msgpack.Encoder().encode
_hellos: Final[msgspec.msgpack.Decoder[RankHello | Superseded]] = (
    msgspec.msgpack.Decoder(RankHello | Superseded)
)

MOVE_SECONDS: Final = 2.0
"""How long the right hub may take to come, where one that is left refused this rank,
for what may as well be a mistake."""

AGAIN_SECONDS: Final = 5.0
"""Before a hub is asked again that refused this rank because of another start: it may
have lost the rank that it had."""

TAKEN_SECONDS: Final = 5.0
"""How long a former rank 0 may take to leave the pool."""


class Joining(Session):
    """A generator rank in the pool; on rank 0 the hub of its replica too.

    Who joins ``again`` may wait for long, and allocates only when trainers are there.
    """

    rank: GeneratorRank

    def __init__(
        self, place: Place, tasks: OwnTasks, member: Member, *, again: bool
    ) -> None:
        super().__init__(place, tasks)
        self._own_tasks: Final = tasks
        self._member: Final = member
        self._again: Final = again
        self.misled = False

    async def close(self) -> None:
        """Leave the others, end every task, and let go of the window's memory."""
        with anyio.CancelScope(shield=True):
            await super().close()
            await self._own_tasks.end()
            if hasattr(self, "rank"):
                self.rank.dispose()

    @property
    def _store_is_there(self) -> bool:
        """A TCP store ends with the trainers; a file stays."""
        shared = isinstance(self.place.address, FileAddress)
        return shared or not hasattr(self, "rank") or self.rank.error is None

    async def formed(self) -> None:
        """Return when the link is formed; raise why it will not be."""
        await self.rank.formed.wait()
        if self.rank.error is not None:
            raise self.rank.error

    async def _join(self) -> None:
        """Join; return when this rank was accepted."""
        started, member = anyio.current_time(), self._member
        member.engine.host = await self._find_host()
        args = self.place.rank, member.slots, member.engine
        # Torch asks a name server, which may not answer for long.
        link = await in_thread_for(self.place.timeout, GeneratorLink, *args)
        settle = partial(member.settle, link)
        place, reading = self.place, member.reading
        self.rank = GeneratorRank(place.rank, reading, link, settle, place.lease)
        if not self._again:
            await self.rank.settle()
        last, holds = member.last
        hello = RankHello(
            member.replica,
            self.place.rank,
            self.place.world_size,
            member.mode.value,
            link.handle,
            self.place.lease,
            last,
            holds,
            incarnation(),
            member.engine.name,
            member.engine.segment,
        )
        if self.place.rank == 0:
            stream = await self._host(hello)
        else:
            name = f"rank 0 of replica {member.replica!r}"
            stream = await self._connect(self._key, hello, ToRank, name)
        peer = Peer(stream, lease=self.place.lease)
        peer.post(Manifests(Together.of([member.manifest])))
        self.rank.speak(peer, self._tasks)
        self._tasks.start_soon(self._converse, peer, self.rank.handle, self.rank.lost)
        try:
            await self._accepted(self.rank, peer)
        except PlanError as error:
            if self._reached is not None and self.place.rank != 0:
                left = started + self.place.timeout - anyio.current_time()
                self.misled = await self._is_misled(error, left)
            raise

    async def _is_misled(self, error: PlanError, left: float) -> bool:
        """Whether the hub that refused this rank is, or may be, of a former start."""
        other = isinstance(error, OtherStartError)
        seconds = min(AGAIN_SECONDS, left) if other else min(MOVE_SECONDS, left / 2)
        deadline = anyio.current_time() + seconds
        moved = await self._is_succeeded(self._key, deadline)
        return moved or (other and left > AGAIN_SECONDS)

    async def _leave(self) -> None:
        """Leave the pool, and say so before trainers find that the link has ended."""
        if hasattr(self, "rank"):
            self.rank.leave()
            await self._conversations.flush()
            await self.rank.end_link()

    @property
    def _key(self) -> str:
        return f"replica/{self._member.replica}"

    async def _host(self, hello: RankHello) -> MessageStream:
        """Be the hub: for this rank directly, for the others over channels."""
        place, member = self.place, self._member
        hub = Hub(
            member.replica,
            member.mode.value,
            place.world_size,
            place.lease,
            member.instance,
            member.engine.name,
            patient=self._again,
        )
        if place.world_size > 1:
            store = await self._open_store(host=False, timeout=place.timeout)
            before = await in_thread(listener_before, store, self._key)
            await self._listen(self._key, FromRank, partial(self._attend, hub))
            if before is not None:
                self._tasks.start_soon(self._succeed, hub, before)
        mine, theirs = local_pair("rank 0", f"rank 0 of replica {member.replica!r}")
        self._tasks.start_soon(self._attend_quietly, hub, _encode(hello), theirs)
        self._tasks.start_soon(self._introduce, hub)
        return mine

    async def _succeed(self, hub: Hub, before: Endpoint) -> None:
        """Take the place of a former rank 0; one that is in the pool keeps it."""
        deadline = anyio.current_time() + min(TAKEN_SECONDS, self.place.timeout / 2)
        while not hub.complete.is_set():
            error = await supersede(before, 0)
            if error is None:
                return
            if anyio.current_time() >= deadline:
                hub.end(Ended(Fault.of(error)))
                return
            await anyio.sleep(PAUSE_SECONDS)

    async def _introduce(self, hub: Hub) -> None:
        """Join the pool once the replica is complete, and stay in it."""
        try:
            stream = await self._meet_leader(hub)
        except WeightSyncError as error:
            hub.end(Ended(Fault.of(error)))
            return
        if stream is None:
            return
        peer = Peer(stream, lease=self.place.lease)
        hub.speak(peer)
        self._tasks.start_soon(self._watch, hub)

        def end(error: WeightSyncError) -> None:
            message = f"replica {hub.replica!r} lost the trainers{hub.term}: {error}"
            hub.end(Ended(Fault.of(PeerError(message))))

        await self._converse(peer, hub.on_leader, end)

    async def _watch(self, hub: Hub) -> None:
        """Look after the signs of life of the ranks, as often as they come."""
        while hub.ended is None and hub.world_size > 1:
            hub.look()
            await anyio.sleep(hub.lease / BEATS)

    async def _meet_leader(self, hub: Hub) -> MessageStream | None:
        """Reach the leader with the hello of a complete replica; None once it ended."""
        deadline = anyio.current_time() + self.place.timeout
        while True:
            with anyio.CancelScope(deadline=deadline):
                await hub.complete.wait()
            if hub.ended is not None:
                return None
            if hub.missing:
                message = (
                    f"replica {hub.replica!r}: ranks {hub.missing} did not join within "
                    f"{self.place.timeout} s"
                )
                raise TimedOutError(message)
            hello = hub.hello
            stream = await self._connect("leader", hello, ToReplica, LEADER)
            if hub.is_as(hello):
                return stream
            await stream.aclose()  # another process has become one of the ranks

    async def _give_way(self, hub: Hub, stream: MessageStream) -> None:
        """Let another process be rank 0, or tell it why not."""
        if hub.introduced:
            message = (
                f"replica {hub.replica!r} is in the pool already, and another process "
                f"is its rank 0: end that one, or choose another name"
            )
            await stream.send(Ended(Fault.of(PlanError(message))))
        elif hub.supersede():
            self._member.replaced = True

    async def _attend_quietly(
        self, hub: Hub, hello: bytes, stream: MessageStream
    ) -> None:
        try:
            await self._attend(hub, hello, stream)
        except WeightSyncError:
            await stream.aclose()

    async def _attend(self, hub: Hub, hello: bytes, stream: MessageStream) -> None:
        """Converse with a rank of the replica, as its hub."""
        try:
            body = _hellos.decode(hello)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{stream.peer} sent no hello of ours") from error
        if isinstance(body, Superseded):
            await self._give_way(hub, stream)
            return
        stream.peer = f"rank {body.rank} of replica {body.replica!r}"
        peer = Peer(stream, lease=body.lease)
        async with admitting(peer, stream):
            (manifest,) = (await manifests(stream, 1)).together.manifests
            hub.rank_joined(body, manifest, peer)
        end = await converse(self._conversations, peer, partial(hub.on_rank, body.rank))
        hub.rank_lost(body.rank, end.error, clean=end.left)
