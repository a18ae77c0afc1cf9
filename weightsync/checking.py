"""Whether a push may begin: what its trainer ranks say, against every replica."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from weightsync.alike import Alike, compare, must_be_alike
from weightsync.errors import PeerError, PlanError, ProtocolError
from weightsync.fit import Fit, check
from weightsync.messages import Layout, Terms
from weightsync.remembered import Remembered
from weightsync.rounds import Transfer
from weightsync.spec import Manifest, validate_manifest
from weightsync.together import Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.messages import PushRequest
    from weightsync.pool import Members
    from weightsync.replays import Replay
    from weightsync.replica import Replica
    from weightsync.rounds import Round


FitKey = tuple[bytes, bool, bool]
"""Layout, partial, cast."""


class Checks:
    """Checks rounds; remembers manifests, and what was found to fit."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._manifests: dict[int, Remembered[bytes, Manifest]] = {}
        self._layouts: Remembered[bytes, Layout] = Remembered()
        self._alike: tuple[object, tuple[Alike, ...]] = None, ()
        self._last: tuple[Layout, Terms] | None = None

    def learn(self, rank: int, request: PushRequest) -> None:
        """Remember what a rank pushes; ProtocolError for what cannot be so."""
        known = self._manifests.setdefault(rank, Remembered())
        if request.manifest is not None:
            validate_manifest(request.manifest)
            if request.manifest.digest != request.digest:
                raise ProtocolError(f"trainer rank {rank} sent a wrong digest")
            known.put(request.digest, request.manifest)
        elif request.fault is None and not known.use(request.digest):
            raise ProtocolError(f"trainer rank {rank} named an unknown manifest")

    def check(self, round_: Round) -> None:
        """Check a round that all ranks have called, and fill it in.

        Raises what was wrong on a rank, PlanError for what does not fit, PeerError
        where there is no replica.
        """
        requests = [round_.requests[rank] for rank in range(self._members.world_size)]
        for rank, request in enumerate(requests):
            if request.fault is not None:
                raise request.fault.error(f"trainer rank {rank}: ")
        self._check_terms(round_, requests)
        counting = self._members.counting
        round_.epoch, round_.version = counting.next(round_.terms.version)
        round_.layout = layout = self._layout(requests)
        replicas = self._members.active
        if not replicas:
            raise PeerError(f"{round_.what}: {self._nobody()}")
        for replica in replicas:
            fit = self._fit(replica, layout, round_.terms)
            round_.transfers[replica.link] = Transfer(replica, fit)
        round_.alike = self._find_alike(round_, layout)
        self._last = layout, round_.terms

    def expected(self, replica: Replica) -> Layout | None:
        """The layout that was pushed last, where it fits a replica that has joined."""
        if self._last is None:
            return None
        try:
            self._fit(replica, *self._last)
        except PlanError:
            return None  # the next push says so
        return self._last[0]

    def check_replay(self, replay: Replay) -> None:
        """Check that what is kept fits the replica; raises PlanError otherwise."""
        replica, layout = replay.replica, replay.kept.layout
        fit = self._fit(replica, layout, replay.terms)
        replay.transfers[replica.link] = Transfer(replica, fit)
        replay.alike = self._find_alike(replay, layout)

    def compare(self, round_: Round) -> None:
        """Compare what the ranks found; raises PlanError where values differ."""
        for rank, answer in sorted(round_.verified.items()):
            if answer.fault is not None:
                raise answer.fault.error(f"trainer rank {rank}: ")
        digests = {rank: answer.digests for rank, answer in round_.verified.items()}
        compare(round_.alike, digests)

    def _check_terms(self, round_: Round, requests: list[PushRequest]) -> None:
        first = requests[0].terms
        for rank, request in enumerate(requests):
            for field in Terms.__struct_fields__:
                mine, theirs = getattr(first, field), getattr(request.terms, field)
                if mine != theirs:
                    message = (
                        f"trainer ranks disagree in their push number {round_.push}: "
                        f"{field} is {mine!r} on rank 0 and {theirs!r} on rank {rank}"
                    )
                    raise PlanError(message)

    def _layout(self, requests: list[PushRequest]) -> Layout:
        digests = [request.digest for request in requests]
        key = blake2b(b"".join(digests), digest_size=16).digest()
        if not self._layouts.use(key):
            known = [self._manifests[rank][d] for rank, d in enumerate(digests)]
            layout = Layout(key, Together.of(known))
            self._layouts.put(key, layout)
            # Each came with tables of its own.
            for rank, manifest in enumerate(layout.manifests):
                self._manifests[rank][digests[rank]] = manifest
        return self._layouts[key]

    def _fit(self, replica: Replica, layout: Layout, terms: Terms) -> Fit:
        """What a push that fits the replica amounts to."""
        key = layout.digest, terms.partial, terms.cast
        if not replica.fits.use(key):
            fit = self._fit_of_another(replica, key) or check(
                layout.manifests,
                replica.manifests,
                replica_name=replica.name,
                partial=terms.partial,
                cast=terms.cast,
            )
            replica.fits.put(key, fit)
        return replica.fits[key]

    def _fit_of_another(self, replica: Replica, key: FitKey) -> Fit | None:
        """What was found for a replica that holds the same, as most of a pool do."""
        for other in self._members.replicas.values():
            if key in other.fits and hold_alike(other.manifests, replica.manifests):
                return other.fits[key]
        return None

    def _find_alike(self, round_: Round, layout: Layout) -> tuple[Alike, ...]:
        """The pieces to compare before anything moves; found once for each layout."""
        pairs = {pair for t in round_.transfers.values() for pair in t.fit.ties}
        ties, copies = tuple(sorted(pairs)), round_.terms.check_replicas
        if not ties and not copies:
            return ()
        key = layout.digest, ties, copies
        if self._alike[0] != key:
            self._alike = key, must_be_alike(layout.manifests, ties, copies=copies)
        return self._alike[1]

    def _nobody(self) -> str:
        replicas = self._members.replicas.values()
        joining = [replica.name for replica in replicas if not replica.waiting]
        waiting = [replica.name for replica in replicas if replica.waiting]
        failed = self._members.log.last_failure([*joining, *waiting])
        names = f"; still joining: {', '.join(joining)}" if joining else ""
        names += f"; waiting to be proposed: {', '.join(waiting)}" if waiting else ""
        names += f"; {failed}" if failed else ""
        return f"no replica has joined (wait_for_replicas waits for them){names}"


def hold_alike(mine: Sequence[Manifest], theirs: Sequence[Manifest]) -> bool:
    """Whether two replicas hold the same; what their ranks share is compared once."""
    if len(mine) != len(theirs):
        return False
    known: set[tuple[int, int]] = set()
    for one, other in zip(mine, theirs, strict=True):
        for column in ("kinds", "names", "kind_of", "ties", "places", "storages"):
            first, second = getattr(one, column), getattr(other, column)
            pair = id(first), id(second)
            if pair not in known and first != second:
                return False
            known.add(pair)
    return True
