"""A leader of two trainer ranks without a network, and what it posts to whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from weightsync.errors import PeerError
from weightsync.hellos import ReplicaHello
from weightsync.messages import (
    Agree,
    Agreed,
    Manifests,
    PushRequest,
    PutEnded,
    Terms,
)
from weightsync.peer import MessageStream, Peer
from weightsync.pool import Members, Replica
from weightsync.push import Pushes
from weightsync.spec import Box, Manifest, TensorSpec
from weightsync.together import Together

if TYPE_CHECKING:
    from collections.abc import Iterable

PLAIN = Terms()


def manifest(*names: str) -> Manifest:
    specs = [TensorSpec(name, "float32", (4,), Box((0,), (4,))) for name in names]
    return Manifest.of(specs)


def held(*manifests: Manifest) -> Manifests:
    """What follows the hello of a replica that holds these."""
    count = len(manifests)
    return Manifests(Together.of(manifests), ("handle",) * count, (0,) * count)


class Line:
    """What was posted to one party, and has not been looked at."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._found: list[Any] = []

    async def listen(self) -> None:
        """Collect messages until the end."""
        with suppress(PeerError):
            while True:
                message = await self._stream.receive()
                self._found.append(message)

    async def _settle(self) -> None:
        """Let everything that was posted arrive, however slow this machine is."""
        before = -1
        while before < len(self._found):
            before = len(self._found)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()

    async def all(self) -> list[Any]:
        """Everything that was posted."""
        await self._settle()
        found, self._found = self._found, []
        return found

    async def kinds(self) -> list[type]:
        """The kinds of everything that was posted."""
        return [type(message) for message in await self.all()]

    async def next(self, kind: type) -> Any:
        """The first message of a kind; those before it are passed over."""
        await self._settle()
        kinds = [type(message) for message in self._found]
        index = kinds.index(kind)
        message = self._found[index]
        del self._found[: index + 1]
        return message


MakePeer = Callable[[str], tuple[Peer, Line]]


class Leader:
    """The leader of two trainer ranks, and the lines to them and to its replicas."""

    def __init__(
        self, peer: MakePeer, *, replay: bool = False, epoch: int | None = None
    ) -> None:
        self._peer = peer
        self.timers: list[Callable[[], None]] = []
        self.members = Members(2, self._after, epoch)
        self.pushes = Pushes(self.members, self._after, replay=replay)
        self.trainers: list[Line] = []
        self.lines: dict[str, Line] = {}
        self._count = 0
        for rank in range(2):
            trainer, line = peer(f"trainer rank {rank}")
            self.members.trainer_joined(rank, 2, trainer)
            self.trainers.append(line)

    def _after(self, seconds: float, act: Callable[[], None]) -> anyio.CancelScope:
        self.timers.append(act)
        return anyio.CancelScope()

    def join(self, name: str, *, names: Iterable[str] = ("w",)) -> Replica:
        peer, self.lines[name] = self._peer(f"replica {name!r}")
        hello = ReplicaHello(name, "staged", 1)
        replica = self.members.replica_joined(hello, held(manifest(*names)), peer)
        for rank in (0, 1, None):
            self.members.linked(rank, replica.link)
        return replica

    async def clear(self) -> None:
        """Look at everything that was posted so far."""
        for line in (*self.trainers, *self.lines.values()):
            await line.all()

    def push(self, pushed: Manifest, terms: Terms = PLAIN) -> None:
        self._count += 1
        for rank in range(2):
            request = PushRequest(self._count, terms, 5.0, pushed.digest, pushed)
            self.pushes.request(rank, request)

    def answer(self, replica: Replica, asked: Agree, *digests: bytes) -> None:
        """Answer for both trainer ranks and the replica, in this order."""
        for rank, digest in zip((0, 1, None), digests, strict=False):
            message = Agreed(replica.link, asked.number, digest)
            self.members.agreed(replica, rank, message)

    def deliver(self, replica: Replica) -> None:
        """Let the transfer that is under way succeed."""
        for rank in range(2):
            ended = PutEnded(replica.link, replica.sequence, (1,))
            self.pushes.put_ended(rank, ended)
        self.pushes.delivered(replica, replica.sequence)
