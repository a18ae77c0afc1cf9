"""Simulated trainer ranks, and replicas: real hubs with simulated ranks around them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from weightsync.bench.pool_network import DELAY, Line, Loop, framed
from weightsync.hellos import RankHello
from weightsync.hub import Hub
from weightsync.messages import (
    Agree,
    Agreed,
    Arrived,
    Commit,
    Credit,
    Discard,
    Ended,
    Expect,
    Fault,
    FormLink,
    FromRank,
    LinkOffered,
    LinkReady,
    OfferLink,
    PushEnded,
    PushRequest,
    Put,
    PutEnded,
    Terms,
    ToReplica,
)
from weightsync.peer import Sign
from weightsync.plan import sum_of_digests
from weightsync.spec import Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.bench.pool_network import Clock
    from weightsync.errors import WeightSyncError

PLAN: Final = 0.99
"""Seconds of a trainer rank to plan for 1,024 trainer ranks: docs/benchmarks.md."""

PLAN_GENERATOR: Final = 3.26
"""The same of a generator rank."""

FORM: Final = 0.5
"""Seconds to form a link and map its windows, after the first time."""

COPY: Final = 2e-3
"""Seconds of a trainer rank to put its share to one replica: 100 MB at 50 GB/s."""

SWITCH: Final = 0.1
"""Seconds from a commit until the next slot is open."""

DIGEST: Final = bytes(15) + b"\1"

_to_hub: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank | Sign)
_from_leader: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToReplica | Sign)


class Sizes(NamedTuple):
    """How many of each there are."""

    trainers: int
    replicas: int
    ranks: int


def manifest() -> Manifest:
    """Return what every rank holds: one tensor; planning is not simulated."""
    return Manifest.of([TensorSpec("w", "float32", (4,), Box((0,), (4,)))])


class Trainer:
    """A trainer rank: answers the leader, after as long as the work would take."""

    def __init__(self, rank: int, clock: Clock, members: dict[int, Replica]) -> None:
        self.rank: Final = rank
        self.line: Line
        self.ended: dict[int, tuple[float, PushEnded]] = {}
        self._clock = clock
        self._members = members
        self._planned: set[int] = set()
        self._putting = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            OfferLink: self._offer,
            FormLink: self._form,
            Agree: self._agree,
            Put: self._put,
            PushEnded: self._end,
        }

    def push(self, number: int, timeout: float, *, first: bool) -> None:
        """Call push."""
        pushed = manifest()
        request = PushRequest(
            number, Terms(), timeout, pushed.digest, pushed if first else None
        )
        self._say(0.0, framed(request))

    def hear(self, messages: list[Any], frames: list[Any]) -> None:
        """Act on what the leader wrote."""
        del frames
        for message in messages:
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)

    def _say(self, seconds: float, frame: bytes) -> None:
        self._clock.at(self._clock.now + seconds + DELAY, self.line.arrive, (frame,))

    def _offer(self, message: OfferLink) -> None:
        handle = f"shm:{100_000 + self.rank}:{message.link}:{message.link << 20}"
        self._say(0.0, framed(LinkOffered(message.link, handle)))

    def _form(self, message: FormLink) -> None:
        self._say(FORM, self._members[message.link].link_ready)

    def _agree(self, message: Agree) -> None:
        seconds = 0.0 if message.link in self._planned else PLAN
        self._planned.add(message.link)
        answer = Agreed(message.link, message.number, DIGEST)
        self._say(seconds, framed(answer))

    def _put(self, message: Put) -> None:
        """One replica after the other."""
        self._putting = max(self._putting, self._clock.now) + COPY
        self._clock.at(self._putting, self._was_put, message)

    def _was_put(self, message: Put) -> None:
        replica = self._members[message.link]
        replica.take()
        self._say(0.0, replica.put_ended(message.sequence))

    def _end(self, message: PushEnded) -> None:
        self.ended[message.push] = self._clock.now, message


class Replica:
    """One incarnation of a replica."""

    def __init__(self, name: str, clock: Clock, sizes: Sizes) -> None:
        self.name: Final = name
        self.hub: Final = Hub(name, "staged", sizes.ranks)
        self.loop: Final = Loop(clock, _to_hub)
        self.sizes: Final = sizes
        self.leader: Line
        """The leader's end of the channel."""
        self.line: Line
        """The hub's end of its channel to the leader."""
        self.link = 0
        self.link_ready = b""
        self.runs = True
        self.dead = False
        self.version: int | None = None
        self._clock = clock
        self._expected: Expect | None = None
        self._taken = 0
        self._ended = 0, b""
        self._lines = [self._rank(rank) for rank in range(sizes.ranks)]

    def _rank(self, rank: int) -> Line:
        line = Line(self.loop, f"rank {rank}", partial(self._hear, rank))
        line.handle = partial(self.hub.on_rank, rank)
        hello = RankHello(
            self.name, rank, self.sizes.ranks, "staged", f"shm:{200_000 + rank}:7:99"
        )
        peer: Any = line
        self.hub.rank_joined(hello, manifest(), peer)
        return line

    def connect(self, deliver: Callable[[list[Any], list[Any]], None]) -> Line:
        """Let the hub speak with the leader."""
        line = Line(self.loop, "the leader", deliver)
        line.decoder = _from_leader
        line.handle = self.hub.on_leader
        line.ended = self._lost
        peer: Any = line
        self.loop.call(lambda: self.hub.speak(peer))
        self.line = line
        return line

    def hear(self, messages: list[Any], frames: list[Any]) -> None:
        """What the leader wrote arrives at the hub."""
        del messages
        if self.runs:
            self.line.arrive(frames)

    def linked(self, link: int) -> None:
        """The leader has taken it in."""
        self.link, self.link_ready = link, framed(LinkReady(link))

    def _lost(self, error: WeightSyncError) -> None:
        self.hub.end(Ended(Fault.of(error)))

    # Its ranks

    def _say(self, rank: int, seconds: float, message: object) -> None:
        def say() -> None:
            if self.runs:
                self._lines[rank].arrive((framed(message),))

        self._clock.at(self._clock.now + seconds + DELAY, say)

    def _hear(self, rank: int, messages: list[Any], frames: list[Any]) -> None:
        del frames
        for message in messages if self.runs else ():
            self._act(rank, message)

    def _act(self, rank: int, message: object) -> None:
        if isinstance(message, FormLink):
            self._say(rank, FORM, LinkReady(message.link))
            self._say(rank, FORM, Credit(0))
        elif isinstance(message, Agree):
            digest = sum_of_digests([DIGEST] * self.sizes.trainers if rank == 0 else [])
            answer = Agreed(message.link, message.number, digest)
            self._say(rank, PLAN_GENERATOR, answer)
        elif isinstance(message, Expect) and rank == 0:
            self._expected = message
            self._look()
        elif isinstance(message, Discard):
            self._expected, self._taken = None, 0
            self._say(rank, 0.0, Credit(0))
        elif isinstance(message, Commit):
            self._say(rank, SWITCH, Credit(0))

    # What trainers put

    def take(self) -> None:
        """A trainer rank has put its share."""
        self._taken += 1
        self._look()

    def _look(self) -> None:
        expected = self._expected
        if expected is None or self._taken < self.sizes.trainers or not self.runs:
            return
        self._expected, self._taken = None, 0
        self.version = expected.version
        for rank in range(self.sizes.ranks):
            self._say(rank, 0.0, Arrived(expected.sequence))

    def put_ended(self, sequence: int) -> bytes:
        """What a trainer rank says of its puts; the same from all of them."""
        if self._ended[0] != sequence or self.dead:
            fault = Fault("PeerError", "rank 0 left the group") if self.dead else None
            signals = () if self.dead else (12,) * self.sizes.ranks
            said = PutEnded(self.link, sequence, signals, fault)
            self._ended = sequence, framed(said)
        return self._ended[1]

    # Its fates

    def die(self) -> None:
        """Every process of it ends; its channel closes."""
        self.runs, self.dead = False, True

    def freeze(self) -> None:
        """No process of it runs any more; nothing closes."""
        self.runs = False
