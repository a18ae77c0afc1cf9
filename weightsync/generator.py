"""A generator rank, inside its runtime: it opens slots, waits for signals, switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from weightsync.agreement import planned
from weightsync.announcing import AllPut
from weightsync.arrival import Arrival
from weightsync.elastic import Present, RollCall
from weightsync.epoch import Mode
from weightsync.errors import (
    ClosedError,
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.lane import translated
from weightsync.messages import (
    Accepted,
    Agree,
    Arrived,
    Commit,
    Credit,
    Discard,
    Ended,
    Expect,
    Fault,
    FormLink,
    Layout,
    Leaving,
    LinkFailed,
    LinkReady,
    ToRank,
    Withdraw,
    Withdrawn,
)
from weightsync.runtime import in_thread
from weightsync.stats import Update
from weightsync.vigil import DEFAULT_LEASE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync.link import GeneratorLink
    from weightsync.memory import Memory
    from weightsync.peer import Peer
    from weightsync.reading import Reading
    from weightsync.runtime import Tasks
    from weightsync.weights import Tensors

LEFTOVER_SECONDS: Final = 5.0
"""Limit for taking signals that trainers say they have sent; they are here already."""

TAKE_BACK_SECONDS: Final = 2.0  # a leader or hub that is stopped gives nothing back

WORD_SECONDS: Final = 1.0
"""How much longer than its lease the word of a leader that is silent may take."""


class Settled(NamedTuple):
    """The window memory of a rank, and its tensors there."""

    memory: Memory
    tensors: Tensors


class GeneratorRank:
    """One generator rank, from when it joins until its replica is out of the pool.

    Runs in the loop of its runtime. ``settle`` gives the rank its window memory, and
    the tensors a place in it; it is called when the link is about to be formed.
    ``lease`` is how many seconds of silence its replica bears from the leader.
    """

    def __init__(
        self,
        rank: int,
        reading: Reading,
        link: GeneratorLink,
        settle: Callable[[], Awaitable[Settled]],
        lease: float = DEFAULT_LEASE,
    ) -> None:
        self.rank: Final = rank
        self.error: WeightSyncError | None = None
        self.accepted = anyio.Event()
        self.formed = anyio.Event()
        self.epochs: Final = reading.epochs
        self._reading: Final = reading
        self._link = link
        self._settle = settle
        self._lease: Final = lease
        self._settled: Settled | None = None
        self._peer: Peer | None = None
        self._tasks: Tasks | None = None
        self._arrival: Arrival | None = None
        self._last: Arrival | None = None
        self._receiving = anyio.Lock()
        self._granted = False

    def speak(self, peer: Peer, tasks: Tasks) -> None:
        """Begin to speak with the hub."""
        self._peer = peer
        self._tasks = tasks

    async def settle(self) -> Settled:
        """Get the window memory, and give the tensors their place there; once."""
        if self._settled is None:
            self._settled = await self._settle()
        return self._settled

    def dispose(self) -> None:
        """Let go of the window memory, however long this object is kept."""
        self._settled = None
        self._link.dispose()

    @property
    def was_in(self) -> bool:
        """Whether its link was formed."""
        return self._granted

    # Calls

    async def receive(self, timeout: float | None) -> Update:
        """Wait for the next whole version and switch it in; see ``Generator``."""
        started = anyio.current_time()
        with anyio.move_on_after(timeout) as scope:
            async with self._receiving:
                try:
                    await self._arrived()
                finally:
                    if self.epochs.mode is Mode.INPLACE and self.epochs.pending is None:
                        with anyio.CancelScope(shield=True):
                            await self._take_back()
                waited = anyio.current_time() - started
                with anyio.CancelScope(shield=True):
                    return await self._switch(waited)
        if not scope.cancelled_caught:
            raise ProtocolError("a receive ended without a version")
        raise TimedOutError(
            f"no version after {self.epochs.version} within {timeout} s"
            f"{self._held_up()}"
        )

    def leave(self) -> None:
        """Leave the pool; ``end_link`` follows."""
        if self._peer is not None:
            self._peer.post(Leaving())
            self._peer.finish()
        self.fail(ClosedError("the generator is closed"))

    async def end_link(self) -> None:
        """Tear the link down."""
        await in_thread(self._link.abort)

    async def _arrived(self) -> None:
        """Return when a version is whole and nobody reads the one before."""
        try:
            while not self._reading.begin_switch():
                change = self._reading.change
                if self.epochs.pending is None:
                    if self.error is not None:
                        raise self.error
                    if self.epochs.mode is Mode.INPLACE:
                        await self._link.engine.settled()
                        self._grant()
                await change.wait()
        finally:
            self._reading.want_no_switch()

    async def _switch(self, waited: float) -> Update:
        arrival = self._last
        if arrival is None or self._settled is None:
            raise ProtocolError("a switch without an arrival")
        started = anyio.current_time()
        names = self._link.pushed_names(arrival.expect.layout)
        tensors = self._settled.tensors
        try:
            with translated():
                await tensors.switch(self._link.window, arrival.slot, names)
        except BaseException as error:
            self._reading.torn |= tensors.covered_by(names)
            self._reading.fail_switch()
            self._post(LinkFailed(0, Fault.of(error)))
            if isinstance(error, WeightSyncError):
                self.fail(error)
            self.fail(Fault.of(error).error())  # of two, the first counts
            raise
        self._reading.torn -= tensors.covered_by(names)
        version = self._reading.end_switch()
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()
        switched = anyio.current_time() - started
        epoch = arrival.expect.epoch
        return Update(version, arrival.nbytes, waited, switched, epoch)

    def _held_up(self) -> str:
        if self.epochs.pending is None:
            return ""
        leases = self.epochs.leases
        return f"; version {self.epochs.pending} waits for {leases} read leases"

    async def _take_back(self) -> None:
        """In place: withdraw an unused credit, so that the tensors can be read again.

        A version that is on its way already is left to the next ``receive``.
        """
        if self._credit_unused():
            self._post(Withdraw())
        with anyio.move_on_after(TAKE_BACK_SECONDS):
            while self._credit_unused():
                await self._reading.change.wait()

    def _credit_unused(self) -> bool:
        exposed = self.epochs.exposed is not None
        return exposed and self._arrival is None and self.error is None

    # What the hub says

    def handle(self, message: ToRank) -> None:  # noqa: C901 -- one case a message.
        """Act on one message; starts a task for what takes time."""
        match message:
            case Accepted():
                self.accepted.set()
            case FormLink():
                self._start(self._form, message)
            case Layout():
                self._link.learn(message)
            case Agree():
                self._start(self._plan, message)
            case Expect():
                self._expect(message)
            case AllPut():
                self._on_announced(message)
            case Discard():
                self._on_discard(message)
            case Commit():
                self._commit(message)
            case Withdrawn():
                self._conceal(written=False)
            case RollCall():
                self._post(Present(message.number))
            case Ended():
                fault = message.fault or Fault.of(ClosedError("the trainer closed"))
                self.fail(fault.error(), untold=message.untold)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def lost(self, error: WeightSyncError) -> None:
        """The hub is gone, perhaps with the word of a version that is being put."""
        self.fail(PeerError(f"this rank lost the trainers: {error}"), untold=True)

    def fail(self, error: WeightSyncError, *, untold: bool = False) -> None:
        """No further version will come. One that is whole can still be received."""
        if self.error is None:
            self.error = error
        self.accepted.set()
        if self._arrival is not None:
            self._arrival.give_up()
        self.formed.set()
        if self.epochs.exposed is not None:
            written = untold or self._arrival is not None
            if written and self.epochs.mode is Mode.INPLACE:
                self._tear(self._arrival)
            self._conceal(written=written)
        self._reading.notify()

    def _tear(self, arrival: Arrival | None) -> None:
        """In place: what a version comes into holds none; all, where it is unknown."""
        if self._settled is None:
            return
        names = None
        if arrival is not None:
            names = self._link.pushed_names(arrival.expect.layout)
        self._reading.torn |= self._settled.tensors.covered_by(names)

    async def _form(self, message: FormLink) -> None:
        try:
            settled = await self.settle()
            await in_thread(self._link.join, message, settled.memory)
        except (WeightSyncError, RuntimeError) as error:
            await self._report(message.link, error)
            return
        self._granted = True
        self.formed.set()
        self._post(LinkReady(message.link))
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()
        self._reading.notify()

    async def _plan(self, message: Agree) -> None:
        self._post(await planned(self._link, message))

    def _grant(self) -> None:
        """Open an exposure epoch and say so, where a slot is free."""
        with self._reading.lock:
            if not self._granted or self.error is not None or self.epochs.free is None:
                return
            slot = self.epochs.expose()
        self._link.window.expose()
        self._post(Credit(slot))

    def _expect(self, message: Expect) -> None:
        if self.epochs.exposed is None:
            raise ProtocolError(
                f"version {message.version} comes while nothing is open"
            )
        self._link.use(message.layout)
        self._arrival = Arrival(message, self.epochs.exposed, self._link)
        self._start(self._arrive, self._arrival)
        self._reading.notify()

    async def _arrive(self, arrival: Arrival) -> None:
        try:
            await arrival.check(await arrival.arrive())
        except WeightSyncError as error:
            if isinstance(error, ClosedError) and arrival.is_given_up():
                await self._forget(arrival)
                return
            await self._report(0, error)
            self.fail(error)
        else:
            if arrival.discard is not None:
                self._reopen()
            else:
                self._post(Arrived(arrival.expect.sequence))

    def _on_announced(self, message: AllPut) -> None:
        arrival = self._arrival
        if arrival is not None and arrival.expect.sequence == message.sequence:
            arrival.announce(message)

    def _on_discard(self, message: Discard) -> None:
        arrival = self._arrival
        if arrival is None or arrival.expect.sequence != message.sequence:
            return
        arrival.discard = message
        if arrival.whole:
            self._reopen()
        else:
            arrival.give_up()

    async def _forget(self, arrival: Arrival) -> None:
        """Take the signals of a version that was given up, then open the slot again."""
        if arrival.discard is None:
            return
        try:
            await arrival.forget(arrival.discard.signals[self.rank], LEFTOVER_SECONDS)
        except WeightSyncError as error:
            await self._report(0, error)
            self.fail(error)
        else:
            self._reopen()

    def _reopen(self) -> None:
        if self._arrival is not None and self.epochs.mode is Mode.INPLACE:
            self._tear(self._arrival)
        self._arrival = None
        self._conceal(written=True)
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()

    def _conceal(self, *, written: bool) -> None:
        self._link.window.conceal()
        self._reading.conceal(written=written)

    def _commit(self, message: Commit) -> None:
        arrival = self._arrival
        if arrival is None or arrival.expect.sequence != message.sequence:
            raise ProtocolError(f"commit of {message.sequence}, which is not here")
        self._arrival, self._last = None, arrival
        with self._reading.lock:
            self.epochs.arrive(arrival.expect.version, arrival.expect.epoch)
        self._reading.notify()

    async def _report(self, link: int, error: Exception) -> None:
        """Tell that a link failed.

        A trainer rank that is gone may have left because it lost the leader, which is
        noticed here a moment later. So the leader, or its end, says first who failed.
        """
        if isinstance(error, PeerError):
            with anyio.move_on_after(self._lease + WORD_SECONDS):
                while self.error is None:
                    await self._reading.change.wait()
        self._post(LinkFailed(link, Fault.of(error)))

    def _post(self, message: object) -> None:
        if self._peer is not None:
            self._peer.post(message)

    def _start(self, function: Any, *args: object) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(function, *args)
