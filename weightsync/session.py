"""What a transport opens and closes in its runtime: store, listeners, channels."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from weightsync.channel import Channel, Endpoint, Listener, connect
from weightsync.errors import (
    ClosedError,
    OtherStartError,
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.fencing import (
    STORE_SECONDS,
    TERM_KEY,
    Fence,
    incarnation,
    supersede,
)
from weightsync.hellos import TrainerHello
from weightsync.leader import Incoming, Leader
from weightsync.messages import ToTrainer
from weightsync.peer import Conversations, MessageStream, Peer, Sign, local_pair
from weightsync.runtime import StuckError, in_thread, in_thread_for
from weightsync.store import (
    FileAddress,
    Rendezvous,
    open_store,
    store_address,
)
from weightsync.trainer import TrainerRank

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync.elastic import Admit
    from weightsync.engines import Engines
    from weightsync.generator import GeneratorRank
    from weightsync.place import Place
    from weightsync.runtime import Tasks
    from weightsync.store import TcpAddress

_encode: Final = msgspec.msgpack.Encoder().encode

LEADER: Final = "the leader (trainer rank 0)"

RETRY_SECONDS: Final = 0.05
ATTEMPT_SECONDS: Final = 5.0
LATE_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.25
"""Before a leader that has failed is asked again, which may stay there for long."""
LOOK_SECONDS: Final = 0.1
"""Between two looks whether an address has changed that does not answer yet."""
LONGEST_TIMEOUT: Final = 1e6
"""What a store can count with, for whoever waits without one."""


class Session(ABC):
    """The common part: conversations, and the store that leads to them."""

    def __init__(self, place: Place, tasks: Tasks) -> None:
        self.place: Final = place
        self.address: TcpAddress | FileAddress = place.address
        self._tasks = tasks
        self._listener: Listener | None = None
        self._rendezvous: Rendezvous | None = None
        self._published: str | None = None
        self._reached: Endpoint | None = None
        self._conversations = Conversations()

    async def open(self) -> None:
        """Join the others; what fails or is cancelled leaves nothing open."""
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the others, also if cancelled; takes a few seconds at most.

        Idempotent.
        """
        with anyio.CancelScope(shield=True):
            await self._leave()
            await self._retract()
            await self._conversations.flush()
            if self._listener is not None:
                await self._listener.aclose()
            self._rendezvous = None

    async def _retract(self) -> None:
        """Take this listener's address out of the store, if that is there."""
        key, self._published = self._published, None
        if key is None or self._rendezvous is None or self._listener is None:
            return
        if not self._store_is_there:
            return
        retract, endpoint = self._rendezvous.retract, self._listener.endpoint
        with suppress(WeightSyncError):
            await in_thread_for(STORE_SECONDS, retract, key, endpoint)

    @property
    def _store_is_there(self) -> bool:
        """Whether it can be asked: torch complains at length about one that is not."""
        return True

    @abstractmethod
    async def _join(self) -> None: ...

    @abstractmethod
    async def _leave(self) -> None: ...

    async def _open_store(self, *, host: bool, timeout: float) -> Rendezvous:
        given_up = threading.Event()
        timeout = min(timeout, LONGEST_TIMEOUT)

        def open_it() -> Any:
            address = self.place.address
            return open_store(address, host=host, timeout=timeout, given_up=given_up)

        store = await in_thread(open_it, cancel=given_up.set)
        self.address = store_address(store, self.place.address)
        self._rendezvous = Rendezvous(store, f"weightsync/{self.place.job}")
        return self._rendezvous

    async def _find_host(self) -> str:
        """Return the interface to listen on; TimedOutError where that stays unknown.

        The name of the store's host may become known only now, as the store may.
        """
        place = self.place
        deadline = anyio.current_time() + place.timeout
        while True:
            try:
                return await in_thread(lambda: place.host)  # may ask a name server
            except OSError as error:
                if anyio.current_time() + PAUSE_SECONDS >= deadline:
                    message = f"no store at {place.address} within {place.timeout} s"
                    raise TimedOutError(f"{message}: {error}") from error
            await anyio.sleep(PAUSE_SECONDS)

    async def _listen(
        self, key: str, message_type: Any, handler: Callable[..., Any]
    ) -> None:
        """Accept channels, and tell where under a key of the store."""
        self._listener = await Listener.open(await self._find_host())
        self._tasks.start_soon(self._listener.serve, message_type | Sign, handler)
        if self._rendezvous is not None:
            self._published, endpoint = key, self._listener.endpoint
            seconds, publish = self.place.timeout, self._rendezvous.publish
            await in_thread_for(seconds, publish, key, endpoint)

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
                self._reached = endpoint = await self._find(key, left)

                async def attempt(
                    to: Endpoint = endpoint,
                    seconds: float = max(min(left, ATTEMPT_SECONDS), 0.1),
                ) -> Channel[Any]:
                    kind = message_type | Sign
                    return await connect(to, body, kind, timeout=seconds, peer=peer)

                return await self._unless_moved(key, endpoint, attempt)
            except (PeerError, TimedOutError) as error:
                if anyio.current_time() >= deadline:
                    message = (
                        f"{peer} was not reached at {self.address} within "
                        f"{self.place.timeout} s: {error}"
                    )
                    raise TimedOutError(message) from error
            await anyio.sleep(RETRY_SECONDS)

    async def _unless_moved(
        self,
        key: str,
        endpoint: Endpoint,
        attempt: Callable[[], Awaitable[Channel[Any]]],
    ) -> Channel[Any]:
        """Attempt to connect, but no longer than the store has this endpoint.

        What is left there of somebody who is dead may lead to a stranger, or nowhere.
        """
        outcome: list[Channel[Any] | WeightSyncError] = []

        async def note() -> None:
            try:
                outcome.append(await attempt())
            except WeightSyncError as error:
                outcome.append(error)
            tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note)
                await self._until_moved(key, endpoint)
                tasks.cancel_scope.cancel()
        except BaseException:
            if outcome and isinstance(outcome[0], Channel):
                await outcome[0].aclose()
            raise
        found = outcome[0] if outcome else PeerError(f"{endpoint} was left")
        if isinstance(found, WeightSyncError):
            raise found
        return found

    async def _until_moved(self, key: str, endpoint: Endpoint) -> None:
        """Return when a key holds another endpoint."""
        found: Endpoint | None = endpoint
        while found in {None, endpoint}:
            await anyio.sleep(LOOK_SECONDS)
            if self._rendezvous is None:
                continue
            with suppress(WeightSyncError):
                find = self._rendezvous.find
                found = await in_thread_for(STORE_SECONDS, find, key, Endpoint)

    async def _is_succeeded(self, key: str, deadline: float) -> bool:
        """Whether somebody else than whom this rank reached comes until then."""
        while (left := deadline - anyio.current_time()) > 0:
            with suppress(PeerError, TimedOutError):
                if await self._find(key, left) != self._reached:
                    return True
            await anyio.sleep(PAUSE_SECONDS)
        return False

    async def _find(self, key: str, left: float) -> Endpoint:
        if self._rendezvous is None:
            await self._open_store(host=False, timeout=max(left, 0.1))
        rendezvous = self._rendezvous
        if rendezvous is None:
            raise ProtocolError("the store is closed")

        def look() -> Endpoint:
            return rendezvous.lookup(key, Endpoint, timeout=min(max(left, 0.1), 1.0))

        try:
            return await in_thread_for(ATTEMPT_SECONDS, look)
        except (PeerError, StuckError):
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

    def __init__(
        self,
        place: Place,
        tasks: Tasks,
        engines: Engines,
        *,
        replay: bool = False,
        admit: Admit = "all",
    ) -> None:
        super().__init__(place, tasks)
        self._engines: Final = engines
        self._hello: Final = TrainerHello(
            place.rank,
            place.world_size,
            place.lease,
            place.epoch,
            incarnation(),
            replay,
            admit,
            engines.name,
        )

    async def _join(self) -> None:
        """Meet the leader; return when it has accepted this rank."""
        place, hello = self.place, self._hello
        if place.rank == 0:
            await self._speak(await self._lead(hello))
            return
        self._engines.host = await self._find_host()
        deadline = anyio.current_time() + place.timeout
        while True:
            try:
                stream = await self._connect("leader", hello, ToTrainer, LEADER)
                await self._speak(stream)
            except (PeerError, ClosedError):
                # It has failed, or is about to end: its successor may come.
                if anyio.current_time() + PAUSE_SECONDS >= deadline:
                    raise
            except OtherStartError as error:
                # Of a leader that is left: the one of this start may still come.
                if not await self._is_succeeded("leader", deadline):
                    late = f"no other leader came within {place.timeout} s"
                    raise OtherStartError(f"{error}; {late}") from error
            else:
                return
            await self.rank.leave()
            await anyio.sleep(PAUSE_SECONDS)

    async def _speak(self, stream: MessageStream) -> None:
        """Become the rank of a leader; return when it has accepted this one."""
        peer = Peer(stream, lease=self.place.lease)
        self.rank = TrainerRank(
            self.place.rank,
            peer,
            self._tasks,
            self._engines,
            replay=self._hello.replay,
        )
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
        store = await self._open_store(host=True, timeout=place.timeout)
        self._engines.host = await self._find_host()
        term = await in_thread(store.count, TERM_KEY)
        before = await in_thread(listener_before, store, "leader")
        shared = isinstance(place.address, FileAddress)
        fence = Fence(place.job, term, store if shared else None)
        self._leader = Leader(hello, self._tasks, fence)
        await self._listen("leader", Incoming, self._leader.attend)
        if before is not None:
            self._tasks.start_soon(supersede, before, term)
        mine, theirs = local_pair("this rank", LEADER)
        self._tasks.start_soon(self._leader.attend_quietly, _encode(hello), theirs)
        return mine


def listener_before(store: Rendezvous, key: str) -> Endpoint | None:
    """Where a predecessor listens, or did; None where a key holds anything else."""
    with suppress(ProtocolError):
        return store.find(key, Endpoint)
    return None


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds; ValueError unless it is positive and finite."""
    if not (0 < timeout < math.inf):
        raise ValueError(f"a timeout is a positive number of seconds, not {timeout}")
    return float(timeout)
