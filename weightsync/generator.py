"""A generator rank, inside its runtime: it opens slots, waits for signals, switches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import anyio

from weightsync.agreement import planned
from weightsync.arrival import Arrival
from weightsync.epoch import Epochs, Mode
from weightsync.errors import (
    ClosedError,
    EpochError,
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
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

if TYPE_CHECKING:
    from weightsync.link import GeneratorLink, Prepared
    from weightsync.peer import Peer
    from weightsync.runtime import Tasks
    from weightsync.weights import Tensors

LEFTOVER_SECONDS: Final = 5.0
"""Limit for taking signals that trainers say they have sent; they are here already."""

POLITE_SECONDS: Final = 5.0
"""How long a new lease lets a switch go first, which may wait for its own caller."""

TAKE_BACK_SECONDS: Final = 2.0  # a leader or hub that is stopped gives nothing back


class GeneratorRank:
    """One generator rank. Runs in the loop of its runtime, but for the leases.

    ``lock`` guards ``epochs``; leases are taken and given back by any thread.
    """

    def __init__(
        self,
        rank: int,
        epochs: Epochs,
        link: GeneratorLink,
        tensors: Tensors,
        memory: Any,
    ) -> None:
        self.rank: Final = rank
        self.epochs: Final = epochs
        self.lock: Final = threading.Condition()
        self.error: WeightSyncError | None = None
        self.accepted = anyio.Event()
        self._link = link
        self._tensors = tensors
        self._memory = memory
        self._peer: Peer | None = None
        self._tasks: Tasks | None = None
        self._arrival: Arrival | None = None
        self._last: Arrival | None = None
        self._changed = anyio.Event()
        self._receiving = anyio.Lock()
        self._granted = False
        self._switch_wanted = False
        self._torn: frozenset[int] = frozenset()

    def speak(self, peer: Peer, tasks: Tasks) -> None:
        """Begin to speak with the hub."""
        self._peer = peer
        self._tasks = tasks

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
        message = (
            f"no version after {self.epochs.version} within {timeout} s"
            f"{self._held_up()}"
        )
        raise TimedOutError(message)

    async def leave(self) -> None:
        """Leave the pool and tear the link down."""
        if self._peer is not None:
            self._peer.post(Leaving())
            self._peer.finish()
        self.fail(ClosedError("the generator is closed"))
        await in_thread(self._link.abort)

    async def _arrived(self) -> None:
        """Return when a version is whole and nobody reads the one before."""
        try:
            while not self._begin_switch():
                if self.epochs.pending is None:
                    if self.error is not None:
                        raise self.error
                    if self.epochs.mode is Mode.INPLACE:
                        self._grant()
                await self._changed.wait()
        finally:
            with self.lock:
                self._switch_wanted = False
                self.lock.notify_all()
            self.notify()

    def _begin_switch(self) -> bool:
        with self.lock:
            if self.epochs.pending is None:
                return False
            if self.epochs.leases:
                self._switch_wanted = True
                return False
            self.epochs.begin_switch()
            return True

    async def _switch(self, waited: float) -> Update:
        arrival = self._last
        if arrival is None:
            raise ProtocolError("a switch without an arrival")
        started = anyio.current_time()
        names = self._link.pushed_names(arrival.expect.layout)
        try:
            await self._tensors.switch(self._link.window, arrival.slot, names)
        except BaseException as error:
            with self.lock:
                self.epochs.fail_switch()
                self.lock.notify_all()
            fault = Fault.of(error)
            self._post(LinkFailed(0, fault))
            self.fail(fault.error())
            raise
        self._torn -= self._tensors.covered_by(names)
        with self.lock:
            version = self.epochs.end_switch(whole=not self._torn)
            self.lock.notify_all()
        self.notify()
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()
        switched = anyio.current_time() - started
        return Update(version, arrival.nbytes, waited, switched)

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
                await self._changed.wait()

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
            case Discard():
                self._on_discard(message)
            case Commit():
                self._commit(message)
            case Withdrawn():
                self._conceal(written=False)
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
        if self._arrival is not None and self._arrival.operation is not None:
            self._arrival.operation.abort()
        if self.epochs.exposed is not None:
            self._conceal(written=untold or self._arrival is not None)
        self.notify()

    def notify(self) -> None:
        """Something changed: let whoever waits in the loop look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _form(self, message: FormLink) -> None:
        try:
            await in_thread(self._link.form, message, self._memory)
        except (WeightSyncError, RuntimeError) as error:
            self._post(LinkFailed(message.link, Fault.of(error)))
            return
        self._granted = True
        self._post(LinkReady(message.link))
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()
        self.notify()

    async def _plan(self, message: Agree) -> None:
        self._post(await planned(self._link, message))

    def _grant(self) -> None:
        """Open an exposure epoch and say so, where a slot is free."""
        with self.lock:
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
        self._arrival = Arrival(message, self.epochs.exposed)
        self._start(self._arrive, self._arrival)
        self.notify()

    async def _arrive(self, arrival: Arrival) -> None:
        try:
            operation, prepared = self._link.await_signals(arrival.expect)
            arrival.operation = operation
            if arrival.discard is not None:
                operation.abort()
            with self._link.naming():
                await operation
            self._check(arrival, prepared)
        except ClosedError:
            if arrival.discard is not None:
                await self._forget(arrival)
        except WeightSyncError as error:
            self._post(LinkFailed(0, Fault.of(error)))
            self.fail(error)
        else:
            if arrival.discard is not None:
                self._reopen()
            else:
                self._post(Arrived(arrival.expect.sequence))

    def _check(self, arrival: Arrival, prepared: Prepared) -> None:
        self._link.window.conceal()
        arrival.nbytes = self._link.check_headers(
            arrival.expect, prepared, arrival.slot
        )
        arrival.whole = True

    def _on_discard(self, message: Discard) -> None:
        arrival = self._arrival
        if arrival is None or arrival.expect.sequence != message.sequence:
            return
        arrival.discard = message
        if arrival.whole:
            self._reopen()
        elif arrival.operation is not None:
            arrival.operation.abort()

    async def _forget(self, arrival: Arrival) -> None:
        """Take the signals of a version that was given up, then open the slot again."""
        if arrival.discard is None:
            return
        sent = enumerate(arrival.discard.signals[self.rank])
        expected = {trainer: count for trainer, count in sent if count}
        try:
            await self._link.window.wait_signals(expected, timeout=LEFTOVER_SECONDS)
        except WeightSyncError as error:
            self._post(LinkFailed(0, Fault.of(error)))
            self.fail(error)
        else:
            self._reopen()

    def _reopen(self) -> None:
        if self._arrival is not None and self.epochs.mode is Mode.INPLACE:
            names = self._link.pushed_names(self._arrival.expect.layout)
            self._torn |= self._tensors.covered_by(names)
        self._arrival = None
        self._conceal(written=True)
        if self.epochs.mode is not Mode.INPLACE:
            self._grant()

    def _conceal(self, *, written: bool) -> None:
        self._link.window.conceal()
        with self.lock:
            if self.epochs.exposed is not None:
                self.epochs.conceal(written=written)
            self.lock.notify_all()
        self.notify()

    def _commit(self, message: Commit) -> None:
        arrival = self._arrival
        if arrival is None or arrival.expect.sequence != message.sequence:
            raise ProtocolError(f"commit of {message.sequence}, which is not here")
        self._arrival, self._last = None, arrival
        with self.lock:
            self.epochs.arrive(arrival.expect.version)
        self.notify()

    # Leases, from any thread

    @property
    def lease_waits(self) -> bool:
        """Whether a polite lease would wait now."""
        return self.epochs.switching or self._switch_wanted

    async def wait_for_switch(self) -> None:
        """Let a switch go first; in the loop."""
        with anyio.move_on_after(POLITE_SECONDS):
            while self.lease_waits:
                await self._changed.wait()

    def acquire(self, *, polite: bool) -> int | None:
        """Take a read lease; wait while a switch is under way.

        ``polite`` callers also let a version go first that waits for leases to end.
        """
        with self.lock:
            if polite:
                self.lock.wait_for(lambda: not self._switch_wanted, POLITE_SECONDS)
            self.lock.wait_for(lambda: not self.epochs.switching)
            if self.epochs.unreadable:
                message = (
                    "in mode 'inplace' the weights cannot be read until receive() "
                    "has returned a whole version"
                )
                raise EpochError(message)
            return self.epochs.acquire()

    def release(self) -> bool:
        """Give a lease back; True if it was the last."""
        with self.lock:
            self.epochs.release()
            return self.epochs.leases == 0

    def _post(self, message: object) -> None:
        if self._peer is not None:
            self._peer.post(message)

    def _start(self, function: Any, *args: object) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(function, *args)
