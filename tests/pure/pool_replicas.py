"""Replicas of a simulated job: the real hub, and small honest ranks around it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tests.pure.pool_network import Process, connect
from tests.pure.pool_trainers import ANSWER, NAMES, Token, manifest
from weightsync.elastic import Present, RollCall
from weightsync.errors import PeerError, WeightSyncError
from weightsync.hellos import RankHello
from weightsync.hub import Hub
from weightsync.messages import (
    Agreed,
    Arrived,
    Credit,
    Ended,
    Fault,
    Leaving,
    LinkFailed,
    LinkReady,
    Withdraw,
)
from weightsync.plan import sum_of_digests
from weightsync.remembered import Remembered

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pure.pool_network import Wire
    from weightsync.messages import Discard, Expect


class Arrival:
    """A version on its way into a rank."""

    def __init__(self, expect: Expect) -> None:
        self.expect: Final = expect
        self.discard: Discard | None = None
        self.push: int | None = None


class Rank(Process):
    """One rank of a replica; answers its hub as ``GeneratorRank`` does."""

    def __init__(self, replica: Replica, rank: int) -> None:
        super().__init__(f"rank {rank} of {replica.label}")
        self.replica: Final = replica
        self.rank: Final = rank
        self.wire: Wire
        self.error: WeightSyncError | None = None
        self.left = False
        self.exposed: int | None = None
        self.arrival: Arrival | None = None
        self.pending: int | None = None
        self.version: int | None = None
        self.commits: list[tuple[int, int]] = []
        """Version, and the push whose bytes it is."""
        self.faulty = False
        self._formed = False
        self._reading = 0
        self._withdrawing = False
        self._signals: dict[int, deque[Token]] = {}
        self._layouts: Remembered[bytes, None] = Remembered()

    @property
    def broken(self) -> bool:
        """Whether its window is gone."""
        return not self.alive or self.left

    # What the program does

    def receive(self) -> None:
        """Switch in what is pending, else in place let something come."""
        if self.pending is not None:
            assert self.version is None or self.version < self.pending
            self.version, self.pending = self.pending, None
            if self.replica.mode == "swap":
                self._reading = 1 - self._reading
            if self.faulty:
                self.wire.post(LinkFailed(0, Fault("PlanError", "cannot be written")))
                self.fail(PeerError("the switch failed"))
            elif self.replica.mode != "inplace":
                self._grant()
        elif self.replica.mode == "inplace":
            self._grant()

    def give_up_receiving(self) -> None:
        unused = self.exposed is not None and self.arrival is None
        if unused and self.error is None and not self._withdrawing:
            self._withdrawing = True
            self.wire.post(Withdraw())

    def leave(self) -> None:
        self.wire.post(Leaving())
        self.wire.finish()
        self.fail(PeerError("closed"))
        self.left = True

    def fail(self, error: WeightSyncError) -> None:
        self.error = self.error or error
        self.exposed = None

    def _grant(self) -> None:
        free = self.pending is None and self.exposed is None
        if self._formed and self.error is None and free and self.arrival is None:
            self.exposed = 1 - self._reading if self.replica.mode == "swap" else 0
            self.wire.post(Credit(self.exposed))

    # What trainers put

    def take(self, trainer: int, slot: int, token: Token) -> None:
        """A trainer rank puts bytes into a slot, and raises a signal."""
        if self.error is None:
            assert slot == self.exposed, f"{self.name} is written to while it is read"
        self._signals.setdefault(trainer, deque()).append(token)

    # What the hub says

    def handle(self, message: Any) -> None:
        name = type(message).__name__
        getattr(self, f"_on_{name.lower()}", lambda _: None)(message)

    def _on_ended(self, message: Ended) -> None:
        fault = message.fault
        self.fail(PeerError("it closed") if fault is None else fault.error())

    def _on_formlink(self, message: Any) -> None:
        assert len(message.manifests) == len(self.replica.ranks)
        own = message.handles[message.trainers + self.rank]
        assert own == f"{self.replica.label} {self.rank}"
        self.start(lambda: self._form(message.link))

    def _form(self, link: int) -> bool:
        if self.faulty:
            self.wire.post(LinkFailed(link, Fault("PeerError", "no memory")))
            return True
        self._formed = True
        self.wire.post(LinkReady(link))
        if self.replica.mode != "inplace":
            self._grant()
        return True

    def _on_layout(self, message: Any) -> None:
        self._layouts.put(message.digest, None)

    def _on_agree(self, message: Any) -> None:
        assert message.layout in self._layouts, "a layout that was not told"
        assert self._formed or self.faulty
        self.start(lambda: self._plan(message))

    def _plan(self, message: Any) -> bool:
        # The sums are equal: rank 0 plans what all trainers do, the others nothing.
        planned = [ANSWER] * self.replica.trainers if self.rank == 0 else []
        fault = Fault("PeerError", "no memory") if self.faulty else None
        digest = sum_of_digests(planned)
        self.wire.post(Agreed(message.link, message.number, digest, fault))
        return True

    def _on_rollcall(self, message: RollCall) -> None:
        self.wire.post(Present(message.number))

    def _on_expect(self, message: Expect) -> None:
        if self.error is not None:
            return
        assert self._layouts.use(message.layout), "a layout that was not told"
        assert self.exposed is not None
        assert self.arrival is None, "two transfers at once"
        self._withdrawing = False
        self.arrival = arrival = Arrival(message)
        self.start(lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> bool | None:
        if arrival.discard is not None or self.error is not None:
            return True
        trainers = range(self.replica.trainers)
        if any(len(self._signals.get(trainer, ())) < 2 for trainer in trainers):
            return None
        tokens = {token for trainer in trainers for token in self._signals[trainer]}
        self._signals.clear()
        (token,) = tokens  # all headers agree
        assert (token.version, token.sequence) == (
            arrival.expect.version,
            arrival.expect.sequence,
        )
        arrival.push = token.push
        self.wire.post(Arrived(arrival.expect.sequence))
        return True

    def _on_discard(self, message: Discard) -> None:
        arrival = self.arrival
        if arrival is None or arrival.expect.sequence != message.sequence:
            return
        arrival.discard = message
        if arrival.push is not None:
            self._reopen()
        else:
            self.start(lambda: self._forget(message))

    def _forget(self, message: Discard) -> bool:
        """Take all that was sent; it is here already, because putting has ended."""
        if self.error is None:
            told = message.signals[self.rank]
            sent = [len(self._signals.get(t, ())) for t in range(len(told))]
            assert list(told) == sent
            self._signals.clear()
            self._reopen()
        return True

    def _reopen(self) -> None:
        self.arrival, self.exposed = None, None
        if self.replica.mode != "inplace":
            self._grant()

    def _on_commit(self, message: Any) -> None:
        if self.error is not None:
            return
        arrival = self.arrival
        assert arrival is not None
        assert arrival.expect.sequence == message.sequence
        assert arrival.push is not None, "committed before everything was here"
        self.commits.append((arrival.expect.version, arrival.push))
        self.pending = arrival.expect.version
        self.arrival, self.exposed = None, None

    def _on_withdrawn(self, message: Any) -> None:
        self._withdrawing = False
        if self.error is None:
            assert self.arrival is None
            self.exposed = None


class Replica:
    """One incarnation of a replica, with the real hub in the process of its rank 0."""

    def __init__(self, label: str, name: str, mode: str, size: int) -> None:
        self.label: Final = label
        self.name: Final = name
        self.mode: Final = mode
        self.trainers = 0
        self.sequence = 0
        """Of the last transfer that it was told to expect."""
        self.hub: Final = Hub(name, mode, size)
        self.ranks: Final = [Rank(self, rank) for rank in range(size)]
        for rank in self.ranks:
            self._join(rank)

    @property
    def broken(self) -> bool:
        return any(rank.broken for rank in self.ranks)

    @property
    def healthy(self) -> bool:
        """Whether it takes part, as far as it knows."""
        return all(rank.runs and rank.error is None for rank in self.ranks)

    @property
    def left(self) -> bool:
        """Whether a rank said that it leaves."""
        return any(rank.left for rank in self.ranks)

    @property
    def disturbed(self) -> bool:
        """Whether anything was ever done to it."""
        return any(rank.disturbed for rank in self.ranks)

    def disturb(self) -> None:
        for rank in self.ranks:
            rank.disturbed = True

    def _join(self, rank: Rank) -> None:
        rank.wire, theirs = connect(rank, self.ranks[0])
        rank.wire.handle = rank.handle
        rank.wire.ended = rank.fail
        hello = RankHello(
            self.name,
            rank.rank,
            len(self.ranks),
            self.mode,  # type: ignore[arg-type] # drawn
            f"{self.label} {rank.rank}",
        )
        told: list[bool] = []

        def handle(message: Any) -> None:
            if isinstance(message, Leaving):
                told.append(True)
            self.hub.on_rank(rank.rank, message)

        theirs.handle = handle
        theirs.ended = lambda error: self.hub.rank_lost(
            rank.rank, error, clean=bool(told)
        )
        self.hub.rank_joined(hello, manifest(*NAMES), theirs)  # type: ignore[arg-type] # a model

    def introduce(
        self, leader: Process, admit: Callable[[Replica, Wire], None]
    ) -> bool:
        """Let the hub connect to the leader."""
        if self.hub.ended is not None:
            return True
        mine, theirs = connect(self.ranks[0], leader)
        mine.handle = self.hub.on_leader
        mine.ended = self._lost
        if not leader.alive:
            self._lost(PeerError("nobody is there"))
            return True
        admit(self, theirs)
        self.hub.speak(mine)  # type: ignore[arg-type] # a model
        return True

    def _lost(self, error: WeightSyncError) -> None:
        self.hub.end(Ended(Fault.of(PeerError(f"the trainers were lost: {error}"))))
