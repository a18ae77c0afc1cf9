"""What a transport opens and closes in its runtime: store, listeners, channels."""

from __future__ import annotations

import math
import socket
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from weightsync.admission import admitting, converse, manifests
from weightsync.channel import Channel, Endpoint, Listener, connect
from weightsync.epoch import Epochs, Mode
from weightsync.errors import (
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.generator import GeneratorRank
from weightsync.hub import Hub
from weightsync.leader import Incoming, Leader
from weightsync.link import GeneratorLink
from weightsync.messages import (
    Ended,
    Fault,
    FromRank,
    Manifests,
    RankHello,
    ToRank,
    ToReplica,
    ToTrainer,
    TrainerHello,
)
from weightsync.peer import Conversations, MessageStream, Peer, Sign, local_pair
from weightsync.runtime import in_thread
from weightsync.slots import Slots
from weightsync.store import (
    FileAddress,
    Rendezvous,
    TcpAddress,
    open_store,
    store_address,
)
from weightsync.together import Together
from weightsync.trainer import TrainerRank
from weightsync.vigil import DEFAULT_LEASE
from weightsync.weights import Tensors
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.layout import Registered
    from weightsync.runtime import Tasks

_encode: Final = msgspec.msgpack.Encoder().encode
_rank_hellos: msgspec.msgpack.Decoder[RankHello] = msgspec.msgpack.Decoder(RankHello)

RETRY_SECONDS: Final = 0.05
ATTEMPT_SECONDS: Final = 5.0
LATE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Who a transport is and where it meets the others."""

    address: TcpAddress | FileAddress
    job: str
    rank: int
    world_size: int
    timeout: float
    lease: float = DEFAULT_LEASE

    @property
    def host(self) -> str:
        """The interface to listen on: this host's end of the way to the store.

        The store's own address where it is served here, and loopback for a file.
        """
        if not isinstance(self.address, TcpAddress):
            return "127.0.0.1"
        family, _, _, _, where = socket.getaddrinfo(
            self.address.host, self.address.port or 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: it only chooses a route
            host: str = probe.getsockname()[0]
            return host


class Session(ABC):
    """The common part: conversations, and the store that leads to them."""

    def __init__(self, place: Place, tasks: Tasks) -> None:
        self.place: Final = place
        self.address: TcpAddress | FileAddress = place.address
        self._tasks = tasks
        self._listener: Listener | None = None
        self._rendezvous: Rendezvous | None = None
        self._conversations = Conversations()

    async def open(self) -> None:
        """Join the others; what fails or is cancelled leaves nothing open."""
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the others, also if cancelled; takes a few seconds at most."""
        with anyio.CancelScope(shield=True):
            await self._leave()
            await self._conversations.flush()
            if self._listener is not None:
                await self._listener.aclose()
            self._rendezvous = None

    @abstractmethod
    async def _join(self) -> None: ...

    @abstractmethod
    async def _leave(self) -> None: ...

    async def _open_store(self, *, host: bool, timeout: float) -> Rendezvous:
        given_up = threading.Event()

        def open_it() -> Any:
            address = self.place.address
            return open_store(address, host=host, timeout=timeout, given_up=given_up)

        store = await in_thread(open_it, cancel=given_up.set)
        self.address = store_address(store, self.place.address)
        self._rendezvous = Rendezvous(store, f"weightsync/{self.place.job}")
        return self._rendezvous

    async def _listen(
        self, key: str, message_type: Any, handler: Callable[..., Any]
    ) -> None:
        """Accept channels, and tell where under a key of the store."""
        host = await in_thread(lambda: self.place.host)  # may ask a name server
        self._listener = await Listener.open(host)
        self._tasks.start_soon(self._listener.serve, message_type | Sign, handler)
        if self._rendezvous is not None:
            endpoint = self._listener.endpoint
            await in_thread(self._rendezvous.publish, key, endpoint)

    async def _connect(
        self, key: str, hello: msgspec.Struct, message_type: Any, peer: str
    ) -> Channel[Any]:
        """Reach whoever listens under a key, however late it comes.

        What a key holds may be left from an earlier job, so it is read again each time.
        """
        deadline = anyio.current_time() + self.place.timeout
        body = _encode(hello)
        while True:
            left = deadline - anyio.current_time()
            try:
                endpoint = await self._find(key, left)
                return await connect(
                    endpoint,
                    body,
                    message_type | Sign,
                    timeout=max(min(left, ATTEMPT_SECONDS), 0.1),
                    peer=peer,
                )
            except (PeerError, TimedOutError) as error:
                if anyio.current_time() >= deadline:
                    message = (
                        f"{peer} was not reached at {self.address} within "
                        f"{self.place.timeout} s: {error}"
                    )
                    raise TimedOutError(message) from error
            await anyio.sleep(RETRY_SECONDS)

    async def _find(self, key: str, left: float) -> Endpoint:
        if self._rendezvous is None:
            await self._open_store(host=False, timeout=max(left, 0.1))
        rendezvous = self._rendezvous
        if rendezvous is None:
            raise ProtocolError("the store is closed")

        def look() -> Endpoint:
            return rendezvous.lookup(key, Endpoint, timeout=min(max(left, 0.1), 1.0))

        try:
            return await in_thread(look)
        except PeerError:
            self._rendezvous = None  # the store went away; its successor may be there
            raise

    async def _converse(
        self,
        peer: Peer,
        handle: Callable[[Any], None],
        end: Callable[[WeightSyncError], None],
    ) -> None:
        end(await self._conversations.hold(peer, handle))

    async def _accepted(self, rank: TrainerRank | GeneratorRank, peer: Peer) -> None:
        """Return once this rank is accepted; raise what came instead."""
        # What else runs into the timeout knows better what is missing: it comes first.
        with anyio.move_on_after(self.place.timeout + LATE_SECONDS):
            await rank.accepted.wait()
        if rank.error is not None:
            raise rank.error
        if not rank.accepted.is_set():
            message = (
                f"{peer.name} did not accept rank {self.place.rank} within "
                f"{self.place.timeout} s"
            )
            raise TimedOutError(message)


class TrainerSession(Session):
    """A trainer rank; on rank 0 the leader too."""

    rank: TrainerRank
    _leader: Leader | None = None

    async def _join(self) -> None:
        """Meet the leader; return when it has accepted this rank."""
        place = self.place
        hello = TrainerHello(place.rank, place.world_size, place.lease)
        if place.rank == 0:
            stream = await self._lead(hello)
        else:
            stream = await self._connect(
                "leader", hello, ToTrainer, "the leader (trainer rank 0)"
            )
        peer = Peer(stream, lease=self.place.lease)
        self.rank = TrainerRank(place.rank, peer, self._tasks)
        self._tasks.on_crash = self.rank.crashed
        self._tasks.start_soon(self._converse, peer, self.rank.handle, self.rank.lost)
        await self._accepted(self.rank, peer)

    async def _leave(self) -> None:
        """Leave, and end the pool if this is the leader."""
        if hasattr(self, "rank"):
            await self.rank.leave()
        if self._leader is not None:
            await self._leader.close()

    async def _lead(self, hello: TrainerHello) -> MessageStream:
        place = self.place
        await self._open_store(host=True, timeout=place.timeout)
        self._leader = Leader(place.world_size, self._tasks)
        await self._listen("leader", Incoming, self._leader.attend)
        mine, theirs = local_pair("this rank", "the leader (trainer rank 0)")
        self._tasks.start_soon(self._leader.attend_quietly, _encode(hello), theirs)
        return mine


class GeneratorSession(Session):
    """A generator rank; on rank 0 the hub of its replica too."""

    rank: GeneratorRank

    def __init__(
        self,
        place: Place,
        tasks: Tasks,
        *,
        replica: str,
        mode: Mode,
        registered: Registered,
    ) -> None:
        super().__init__(place, tasks)
        self.replica: Final = replica
        self._mode: Final = mode
        self._registered: Final = registered

    async def _join(self) -> None:
        """Allocate the window and join; return when this rank was accepted."""
        link = await in_thread(self._prepare)
        hello = RankHello(
            self.replica,
            self.place.rank,
            self.place.world_size,
            self._mode.value,
            link.handle,
            self.place.lease,
        )
        if self.place.rank == 0:
            stream = await self._host(hello)
        else:
            key = f"replica/{self.replica}"
            name = f"rank 0 of replica {self.replica!r}"
            stream = await self._connect(key, hello, ToRank, name)
        peer = Peer(stream, lease=self.place.lease)
        peer.post(Manifests(Together.of([self._registered.manifest])))
        self.rank.speak(peer, self._tasks)
        self._tasks.start_soon(self._converse, peer, self.rank.handle, self.rank.lost)
        await self._accepted(self.rank, peer)

    async def _leave(self) -> None:
        """Leave the pool."""
        if hasattr(self, "rank"):
            await self.rank.leave()

    def _prepare(self) -> GeneratorLink:
        slots = Slots.of(self._mode, self._registered.manifest)
        link = GeneratorLink(self.place.rank, slots)
        memory = Window.allocate(link.group, slots.nbytes)
        tensors = Tensors(self._mode, self._registered, memory, slots)
        tensors.move_in()
        self.rank = GeneratorRank(
            self.place.rank, Epochs(self._mode), link, tensors, memory
        )
        self._tasks.on_crash = self.rank.fail
        return link

    async def _host(self, hello: RankHello) -> MessageStream:
        """Be the hub: for this rank directly, for the others over channels."""
        place = self.place
        hub = Hub(self.replica, self._mode.value, place.world_size, place.lease)
        if place.world_size > 1:
            await self._open_store(host=False, timeout=place.timeout)
            attend = partial(self._attend, hub)
            await self._listen(f"replica/{self.replica}", FromRank, attend)
        mine, theirs = local_pair("rank 0", f"rank 0 of replica {self.replica!r}")
        self._tasks.start_soon(self._attend_quietly, hub, _encode(hello), theirs)
        self._tasks.start_soon(self._introduce, hub)
        return mine

    async def _introduce(self, hub: Hub) -> None:
        """Join the pool once the replica is complete, and stay in it."""
        with anyio.move_on_after(self.place.timeout):
            await hub.complete.wait()
        if hub.ended is not None:
            return
        try:
            if hub.missing:
                message = (
                    f"replica {hub.replica!r}: ranks {hub.missing} did not join within "
                    f"{self.place.timeout} s"
                )
                raise TimedOutError(message)
            stream = await self._connect(
                "leader", hub.hello, ToReplica, "the leader (trainer rank 0)"
            )
        except WeightSyncError as error:
            hub.end(Ended(Fault.of(error)))
            return
        peer = Peer(stream, lease=self.place.lease)
        hub.speak(peer)

        def end(error: WeightSyncError) -> None:
            message = f"replica {hub.replica!r} lost the trainers: {error}"
            hub.end(Ended(Fault.of(PeerError(message))))

        await self._converse(peer, hub.on_leader, end)

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
            body = _rank_hellos.decode(hello)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{stream.peer} sent no hello of ours") from error
        stream.peer = f"rank {body.rank} of replica {body.replica!r}"
        peer = Peer(stream, lease=body.lease)
        async with admitting(peer, stream):
            (manifest,) = await manifests(stream, 1)
            hub.rank_joined(body, manifest, peer)
        end = await converse(self._conversations, peer, partial(hub.on_rank, body.rank))
        hub.rank_lost(body.rank, end.error, clean=end.left)


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds; ValueError unless it is positive and finite."""
    if not (0 < timeout < math.inf):
        raise ValueError(f"a timeout is a positive number of seconds, not {timeout}")
    return float(timeout)
