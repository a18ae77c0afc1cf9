"""What trainer ranks keep of the last push, and which replica is to get it: the leader.

A replay is a round with one transfer. It differs from a push in that no trainer rank
calls it, that it waits as long as it must, and that every push goes before it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from weightsync.counting import Held
from weightsync.elastic import FIRST_REPLAY
from weightsync.errors import ClosedError, WeightSyncError
from weightsync.merging import can_merge
from weightsync.remembered import Remembered
from weightsync.rounds import Round, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.elastic import Keep
    from weightsync.messages import Layout, Terms
    from weightsync.pool import After, Members
    from weightsync.replica import Replica
    from weightsync.stats import PushReport

REOPEN_SECONDS: Final = 2.0
"""How long a replica has to open the slot again that was taken from a replay."""


class KeptVersion:
    """A version, and the trainer ranks that have not said yet that they keep it."""

    def __init__(self, round_: Round, layout: Layout, terms: Terms, ranks: int) -> None:
        self.push: Final = round_.push
        self.held: Final = Held(round_.epoch, round_.version)
        self.layout: Final = layout
        self.terms: Final = terms
        self.missing: Final = set(range(ranks))


class Replay(Round):
    """A version that is kept, on its way to one replica."""

    def __init__(self, number: int, kept: KeptVersion, replica: Replica) -> None:
        super().__init__(number)
        self.kept: Final = kept
        self.replica: Final = replica
        self.layout = kept.layout
        self.epoch, self.version = kept.held

    @property
    def terms(self) -> Terms:
        """Those of the push; but it has time, and what is kept was compared then."""
        terms = self.kept.terms
        return replace(terms, on_busy="wait", require="any", check_replicas=False)

    @property
    def what(self) -> str:
        """What messages call it."""
        return f"replay of version {self.version}"


class Rounds(Protocol):
    """Where replays are carried out, like pushes."""

    def replay(self, replay: Replay) -> None:
        """Begin a replay."""

    def give_up(self, round_: Round, error: WeightSyncError) -> None:
        """Let a round fail as soon as it can end."""

    def rounds_to(self, link: int) -> list[tuple[Round, Transfer]]:
        """The rounds that concern a replica, and their transfers to it."""
        ...

    def ready(self, replica: Replica) -> None:
        """Let the transfer go that waits for a replica."""


class Replays:
    """What is kept, and its replays. ``enabled`` says whether anything ever is kept."""

    def __init__(
        self, rounds: Rounds, members: Members, after: After, *, enabled: bool
    ) -> None:
        self._rounds: Final = rounds
        self._members: Final = members
        self._after: Final = after
        self._enabled: Final = enabled
        self._kept: KeptVersion | None = None
        self._newest = Held(0, 0)
        self._count = 0
        self._by_link: dict[int, Replay] = {}
        self._by_number: dict[int, Replay] = {}
        self._merges: Remembered[tuple[bytes, bytes], bool] = Remembered()

    # What is kept

    def keep(self, round_: Round, report: PushReport | None) -> Keep:
        """What trainer ranks are to keep of a push that ends so.

        All of it if a replica was delivered to. A partial one goes into the version
        before, where that is the whole of what replicas hold; else nothing is kept. Who
        was cancelled can keep nothing: its tensors may change from now on.
        """
        nothing = report is None or not report.delivered
        if nothing or not self._enabled or isinstance(round_, Replay):
            return "no"
        base, newest = self._base, self._newest
        self._newest = Held(round_.epoch, round_.version)
        if round_.fault is not None:
            return "no"
        self._kept = self._next(round_, base, newest)
        if self._kept is None:
            return "no"
        # What replays read is overwritten now.
        self.give_up(list(self._by_link), f"for {round_.what}")
        return "parts" if round_.terms.partial else "all"

    def kept(self, rank: int, push: int) -> None:
        """A trainer rank keeps a push; with the last of them it can be replayed."""
        if self._kept is None or self._kept.push != push:
            return
        self._kept.missing.discard(rank)
        if not self._kept.missing:
            self.look_again()

    @property
    def _base(self) -> KeptVersion | None:
        """The version that all trainer ranks keep."""
        return None if self._kept is None or self._kept.missing else self._kept

    def _next(
        self, round_: Round, base: KeptVersion | None, newest: Held
    ) -> KeptVersion | None:
        layout, ranks = round_.layout, self._members.world_size
        if layout is None:
            return None
        if not round_.terms.partial:
            return KeptVersion(round_, layout, round_.terms, ranks)
        if base is None or base.held != newest or not self._fits(base, layout):
            return None
        return KeptVersion(round_, base.layout, base.terms, ranks)

    def _fits(self, base: KeptVersion, parts: Layout) -> bool:
        key = base.layout.digest, parts.digest
        if not self._merges.use(key):
            self._merges.put(key, can_merge(base.layout.manifests, parts.manifests))
        return self._merges[key]

    # Who gets it

    @property
    def under_way(self) -> list[Replay]:
        """All replays."""
        return list(self._by_link.values())

    def to(self, link: int) -> list[Replay]:
        """The replay to a replica, if there is one."""
        return [self._by_link[link]] if link in self._by_link else []

    def numbered(self, push: int) -> Replay | None:
        """The replay of this number, if it is under way."""
        return self._by_number.get(push)

    def look_again(self) -> None:
        """Something has ended, or is kept: see which replicas can be delivered to."""
        for replica in self._members.active:
            self.look(replica)

    def look(self, replica: Replica) -> None:
        """Let a replica have what is kept, if it lacks it and nothing else comes."""
        base = self._base
        if base is None or not (replica.active and replica.behind):
            return
        if replica.last is not None and replica.last >= base.held:
            return
        if self._members.error is not None or self._is_served(replica.link):
            return
        self._count += 1
        replay = Replay(FIRST_REPLAY + self._count, base, replica)
        self._by_link[replica.link] = self._by_number[replay.push] = replay
        self._rounds.replay(replay)

    def _is_served(self, link: int) -> bool:
        rounds = self._rounds.rounds_to(link)
        return any(round_.outcome is None for round_, _ in rounds)

    def give_up(self, links: Iterable[int], why: str) -> None:
        """Let a push go before the replays to these links."""
        for link in links:
            replay = self._by_link.get(link)
            if replay is None or replay.outcome is not None:
                continue
            transfer = replay.transfers.get(link)
            if transfer is not None and transfer.moving:
                # It is not busy while its slot is on the way back.
                replay.replica.reopening = True
                self._after(REOPEN_SECONDS, partial(self._give_in, replay.replica))
            error = ClosedError(f"{replay.what} was given up {why}")
            self._rounds.give_up(replay, error)

    def _give_in(self, replica: Replica) -> None:
        if replica.reopening:
            replica.reopening = False
            self._rounds.ready(replica)

    def ended(self, replay: Replay, error: WeightSyncError | None) -> None:
        """A replay has ended: delivered, given up, or failed for good."""
        replica = replay.replica
        self._by_number.pop(replay.push, None)
        if self._by_link.get(replica.link) is replay:
            del self._by_link[replica.link]
        if replica.gone or self._members.error is not None:
            return
        if error is not None and replay.fault is None:
            replica.behind = False
            self._members.tell("unready", replica.name, f"{replay.what}: {error}")
        self._rounds.ready(replica)  # a push may have waited for this
        self.look(replica)
