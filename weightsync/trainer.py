"""A trainer rank, inside its runtime: it answers the leader and puts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, assert_never

import anyio

from weightsync.elastic import FIRST_REPLAY, Kept
from weightsync.errors import (
    ClosedError,
    PeerError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.following import Following
from weightsync.keeping import Keeper
from weightsync.links import Links
from weightsync.locate import named
from weightsync.membership import Happened, TellMembership
from weightsync.messages import (
    Accepted,
    Agree,
    DropLink,
    Ended,
    Fault,
    FormLink,
    Layout,
    Leaving,
    OfferLink,
    Pool,
    PushCancel,
    PushEnded,
    Put,
    PutEnded,
    Stop,
    ToTrainer,
    Verified,
    Verify,
)
from weightsync.pushing import Push, PushOptions, request
from weightsync.recapture import Recapture
from weightsync.remembered import Remembered
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from weightsync.engines import Engines
    from weightsync.layout import Captured, StateDict
    from weightsync.link import TrainerLink
    from weightsync.peer import Peer
    from weightsync.runtime import Tasks
    from weightsync.stats import PushReport

GRACE_SECONDS: Final = 2.5
"""How much longer than a push's timeout a rank waits for the leader's word."""

READ_SECONDS: Final = 0.25
"""How long it then reads what has arrived already."""


class TrainerRank:
    """One trainer rank. Everything here runs in the loop of its runtime."""

    def __init__(
        self,
        rank: int,
        peer: Peer,
        tasks: Tasks,
        engines: Engines,
        *,
        replay: bool = False,
    ) -> None:
        self.rank: Final = rank
        self.engines: Final = engines
        self.replicas: tuple[str, ...] = ()
        self.error: WeightSyncError | None = None
        self.term = 0
        self.accepted = anyio.Event()
        self.following: Final = Following(peer)
        self._peer = peer
        self._tasks = tasks
        self._changed = anyio.Event()
        self._pushing = anyio.Lock()
        self._pushes = 0
        self._push: Push | None = None
        self._putting: set[tuple[TrainerLink, Push]] = set()
        self._keeper = Keeper(enabled=replay, ordered=engines.ordered)
        self._capture = Recapture(engines.check_pieces)
        self._sent: Remembered[bytes, None] = Remembered()
        self._layouts: Remembered[bytes, Layout] = Remembered()
        self._links = Links(rank, peer, engines, self._layouts)

    # Calls

    async def wait_for_replicas(self, count: int, timeout: float) -> tuple[str, ...]:
        """Return the names of the pool's replicas once there are ``count``."""
        with anyio.move_on_after(timeout):
            while len(self.replicas) < count:
                self._check()
                self.engines.check_budget()
                await self._changed.wait()
            return self.replicas
        names = ", ".join(self.replicas) or "none"
        message = (
            f"trainer rank {self.rank} waited {timeout} s for {count} replicas; "
            f"{len(self.replicas)} joined: {names}{await self.following.absent()}"
        )
        raise TimedOutError(message)

    async def push(self, state_dict: StateDict, options: PushOptions) -> PushReport:
        """Take part in one push; see ``Trainer.push``."""
        self._check()
        # The n-th calls of all ranks belong together, so a call that is given up early
        # is told to the others under its number.
        self._pushes += 1
        number = self._pushes
        deadline = anyio.current_time() + options.timeout
        asked = False
        try:
            async with self._turn(options.timeout):
                captured = await self._captured(state_dict, options)
                partial = options.terms.partial
                await self._keeper.prepare(captured, partial=partial)
                self._check()  # nobody answers any more if this changed meanwhile
                self._push = push = Push(number, captured, options.after)
                self._ask(number, options, captured, deadline)
                asked = True
                return await self._outcome(push, options.timeout)
        except BaseException as error:
            if not asked:
                self._ask(number, options, self._given_up(error), deadline)
            raise

    @asynccontextmanager
    async def _turn(self, timeout: float) -> AsyncGenerator[None]:
        """One push at a time, in the order of the calls."""
        with anyio.move_on_after(timeout) as waiting:
            await self._pushing.acquire()
        if waiting.cancelled_caught:
            message = f"the push before this one took longer than {timeout} s"
            raise TimedOutError(message)
        try:
            self._check()
            yield
        finally:
            self._push = None
            self._pushing.release()

    async def leave(self) -> None:
        """Tell the leader that this rank leaves, and tear all links down."""
        self._peer.post(Leaving())
        self._peer.finish()
        self.following.end(ClosedError("the trainer is closed"))
        for link in self._links.take_all():
            await in_thread(link.abort)
        await self._keeper.close()

    async def _captured(
        self, state_dict: StateDict, options: PushOptions
    ) -> Captured | Fault:
        """Capture, or what is wrong: the other ranks must hear of it, and not wait."""
        try:
            if isinstance(options.after, WeightSyncError):  # the device has failed
                raise options.after
            # Here and once: pairs may come from a generator.
            entries = named(state_dict)
            chosen = entries, options.ignore, options.names
            captured = self._capture.again(*chosen)
            if captured is None:
                # May copy what is not contiguous: not in the loop.
                captured = await in_thread(self._capture_in_order, options, *chosen)
            self.engines.check(captured.tensors, captured.manifest.names)
            if not self.replicas:
                self.engines.check_budget()
        except WeightSyncError as error:
            return Fault.of(error)
        return captured

    def _capture_in_order(self, options: PushOptions, *chosen: Any) -> Captured:
        with self.engines.ordered(options.after):
            return self._capture(*chosen)

    def _given_up(self, error: BaseException) -> Fault:
        if isinstance(error, WeightSyncError):
            return Fault.of(error)
        return Fault.of(ClosedError(f"it was cancelled on trainer rank {self.rank}"))

    def _ask(
        self,
        number: int,
        options: PushOptions,
        captured: Captured | Fault,
        deadline: float,
    ) -> None:
        left = max(deadline - anyio.current_time(), 0.001)
        self._peer.post(request(number, options, captured, self._sent, left))

    async def _outcome(self, push: Push, timeout: float) -> PushReport:
        try:
            with anyio.move_on_after(timeout + GRACE_SECONDS):
                await push.ended.wait()
            # Who was stopped itself for so long reads only now what was said meanwhile.
            with anyio.move_on_after(READ_SECONDS):
                await push.ended.wait()
        except anyio.get_cancelled_exc_class():
            self._peer.post(PushCancel(push.number))
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(GRACE_SECONDS):
                    await push.ended.wait()
                await self._finish(push)
            raise
        with anyio.CancelScope(shield=True):
            await self._finish(push)
        if push.outcome is None:
            message = f"the leader (trainer rank 0) is silent for {timeout} s"
            self._fail(TimedOutError(message))
            raise TimedOutError(message)
        if push.outcome.fault is not None:
            error = push.outcome.fault.error()
            error.report = push.outcome.report
            raise error
        if push.outcome.report is None:
            raise ProtocolError("the leader ended a push with neither report nor fault")
        return push.outcome.report

    async def _finish(self, push: Push) -> None:
        """Keep what is to be kept; no byte of the caller's tensors is read after."""
        for link, read in self._putting:
            if read is push:
                link.stop()
        await push.stop_reading()
        keep = "no" if push.outcome is None else push.outcome.keep
        if await self._keeper.keep(push, keep):
            self._peer.post(Kept(push.number))

    # What the leader says

    def handle(self, message: ToTrainer) -> None:  # noqa: C901, PLR0912, PLR0915 -- one case a message.
        """Act on one message; starts a task for what takes time."""
        match message:
            case Accepted():
                self.term = message.term
                self.accepted.set()
            case Pool():
                self.replicas = message.replicas
                self._notify()
            case Happened() | TellMembership():
                self.following.handle(message)
            case OfferLink():
                self._links.offer(self._tasks, message)
            case FormLink():
                self._start_form(message)
            case DropLink():
                self._links.drop(self._tasks, message)
            case Layout():
                self._layouts.put(message.digest, message)
            case Agree():
                self._tasks.start_soon(self._links.plan, message)
            case Verify():
                self._start_verify(message)
            case Put():
                self._start_put(message)
            case Stop():
                self._stop(message)
            case PushEnded():
                self._end_push(message)
            case Ended():
                self._end(message.fault)
            case _:
                assert_never(message)

    def _end(self, fault: Fault | None) -> None:
        if fault is None:
            self.following.end(ClosedError("trainer rank 0 left"))
        left = PeerError("trainer rank 0 left")
        self._fail(left if fault is None else fault.error())

    def lost(self, error: WeightSyncError) -> None:
        """The leader is gone."""
        who = f"trainer rank {self.rank} lost the leader of term {self.term}"
        self._fail(PeerError(f"{who}: {error}"))

    def crashed(self, error: WeightSyncError) -> None:
        """Something of ours failed that should not have: nothing can be trusted now."""
        self._fail(error)

    def _fail(self, error: WeightSyncError) -> None:
        if self.error is None:
            self.error = error
        self.replicas = ()
        self.following.end(self.error)
        self.accepted.set()
        self._notify()
        for link in self._links.take_all():
            self._tasks.start_soon(in_thread, link.abort)
        if self._push is not None and not self._push.ended.is_set():
            number = self._push.number
            self._end_push(PushEnded(number, None, Fault.of(self.error)))

    def _end_push(self, message: PushEnded) -> None:
        push = self._push
        if push is not None and push.number == message.push:
            push.outcome = message
            push.ended.set()

    def _push_to_read(self, number: int) -> Push | None:
        """The push of this number, or what is kept for a replay, now being read.

        None where it is given up here.
        """
        push = self._push
        if number >= FIRST_REPLAY:
            push = self._keeper.push
        elif push is not None and push.number != number:
            push = None
        return push if push is not None and push.begin_reading() else None

    def _start_verify(self, message: Verify) -> None:
        push = self._push_to_read(message.push)
        if push is not None:
            self._tasks.start_soon(self._verify, push, message)

    async def _verify(self, push: Push, message: Verify) -> None:
        try:
            digests = await in_thread(push.digest, message.pieces)
        except WeightSyncError as error:
            answer = Verified(message.push, (), Fault.of(error))
        else:
            answer = Verified(message.push, digests)
        finally:
            push.end_reading()
        self._peer.post(answer)

    # Links

    def _start_form(self, message: FormLink) -> None:
        link = self._links.get(message.link)
        if link is not None:
            self._tasks.start_soon(self._form, link, message)

    async def _form(self, link: TrainerLink, message: FormLink) -> None:
        await self._links.form(link, message)
        self._notify()  # whoever waits for replicas asks why there are none

    def _start_put(self, message: Put) -> None:
        self._layouts.use(message.layout)  # here too where the push is given up already
        link = self._links.get(message.link)
        push = None if link is None else self._push_to_read(message.push)
        if push is None or link is None:
            # Given up here already: nothing is sent, and the leader hears so.
            none = () if link is None else (0,) * link.ranks
            self._peer.post(PutEnded(message.link, message.sequence, none))
            return
        self._tasks.start_soon(self._put, push, link, message)

    def _stop(self, message: Stop) -> None:
        link = self._links.get(message.link)
        if link is not None:
            link.stop(message.sequence)

    async def _put(self, push: Push, link: TrainerLink, message: Put) -> None:
        fault: Fault | None = None
        sent: tuple[int, ...] = ()
        self._putting.add((link, push))
        try:
            sent = await link.put(message, push.tensors, push.after)
        except WeightSyncError as error:
            fault = Fault.of(error)
        finally:
            self._putting.discard((link, push))
            push.end_reading()
        self._peer.post(PutEnded(message.link, message.sequence, sent, fault))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
