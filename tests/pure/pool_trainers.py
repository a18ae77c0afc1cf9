"""Trainer ranks of a simulated job: small, honest, and as slow as the machine likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.pure.pool_network import Process
from weightsync.errors import PeerError, TimedOutError, WeightSyncError
from weightsync.messages import (
    Agreed,
    Fault,
    Leaving,
    LinkFailed,
    LinkOffered,
    LinkReady,
    PushCancel,
    PushRequest,
    PutEnded,
    Terms,
    Verified,
)
from weightsync.remembered import Remembered
from weightsync.spec import Box, Manifest, TensorSpec
from weightsync.trainer import GRACE_SECONDS

if TYPE_CHECKING:
    from tests.pure.pool_network import Clock, Wire
    from tests.pure.pool_replicas import Replica
    from weightsync.messages import PushEnded

NAMES: Final = ("a", "b", "c")
ANSWER: Final = bytes(15) + b"\1"
"""The digest of the plan of a trainer rank."""


def manifest(*names: str) -> Manifest:
    box = Box((0,), (4,))
    return Manifest.of([TensorSpec(name, "float32", (4,), box) for name in names])


LAYOUTS: Final = tuple(manifest(*NAMES[at:], *NAMES[:at]) for at in range(len(NAMES)))
"""The same tensors in another order are another layout."""


class Token(NamedTuple):
    """What a signal stands for: bytes of this push, put as this transfer."""

    push: int
    version: int
    sequence: int


class Asked(NamedTuple):
    """What a rank calls ``push`` with; ``fault`` says that it cannot be captured."""

    terms: Terms
    timeout: float
    layout: int
    fault: bool = False


class Call:
    """One push, as a rank sees it."""

    def __init__(self, number: int, asked: Asked, now: float) -> None:
        self.number: Final = number
        self.asked: Final = asked
        self.deadline = now + asked.timeout + GRACE_SECONDS
        self.cancelled = False
        self.readers = 0
        self.over = False


class End:
    """A rank's end of a link."""

    def __init__(self, replica: Replica) -> None:
        self.replica: Final = replica
        self.formed = False
        self.aborted = False
        self.planned: set[bytes] = set()
        self.stopped: set[int] = set()


class Trainer(Process):
    """Answers the leader as ``TrainerRank`` does."""

    def __init__(self, rank: int, clock: Clock, replicas: dict[int, Replica]) -> None:
        super().__init__(f"trainer rank {rank}")
        self.rank: Final = rank
        self.wire: Wire
        self.calls: list[Call] = []
        self.heard: dict[int, PushEnded] = {}
        self.events: list[Any] = []
        self.pool: tuple[str, ...] = ()
        self.error: WeightSyncError | None = None
        self.faulty = False
        self._clock = clock
        self._replicas = replicas
        self._ends: dict[int, End] = {}
        self._sent: Remembered[bytes, None] = Remembered()
        self._layouts: Remembered[bytes, None] = Remembered()

    # What the program does

    @property
    def call(self) -> Call | None:
        """The push under way."""
        return self.calls[-1] if self.calls and not self.calls[-1].over else None

    @property
    def idle(self) -> bool:
        reads = bool(self.calls) and self.calls[-1].readers > 0
        return self.runs and self.error is None and self.call is None and not reads

    def push(self, asked: Asked) -> None:
        call = Call(len(self.calls) + 1, asked, self._clock.now)
        self.calls.append(call)
        pushed = LAYOUTS[asked.layout]
        fault = Fault("PlanError", "no tensor") if asked.fault else None
        known = fault is None and self._sent.use(pushed.digest)
        if fault is None and not known:
            self._sent.put(pushed.digest, None)
        self.wire.post(
            PushRequest(
                push=call.number,
                terms=asked.terms,
                timeout=asked.timeout,
                digest=pushed.digest if fault is None else bytes(16),
                manifest=None if known or fault is not None else pushed,
                fault=fault,
            )
        )

    def cancel(self) -> None:
        call = self.call
        if call is not None and not call.cancelled:
            call.cancelled = True
            call.deadline = self._clock.now + GRACE_SECONDS
            self.wire.post(PushCancel(call.number))

    def leave(self) -> None:
        self.wire.post(Leaving())
        self.wire.finish()
        self.fail(PeerError("closed"))

    def look_at_clock(self) -> None:
        """Nobody waits for ever for the word of the leader."""
        call = self.call
        if call is None or not self.runs or self._clock.now <= call.deadline:
            return
        if call.cancelled:
            call.over = True
        else:
            self.fail(TimedOutError("the leader is silent"))

    def fail(self, error: WeightSyncError) -> None:
        self.error = self.error or error
        for end in self._ends.values():
            end.aborted = True
        self._ends.clear()
        if self.call is not None:
            self.call.over = True

    # What the leader says

    def handle(self, message: Any) -> None:
        name = type(message).__name__
        getattr(self, f"_on_{name.lower()}", lambda _: None)(message)

    def _on_pool(self, message: Any) -> None:
        self.pool = message.replicas

    def _on_happened(self, message: Any) -> None:
        self.events += message.events

    def _on_ended(self, message: Any) -> None:
        fault = message.fault
        self.fail(PeerError("it left") if fault is None else fault.error())

    def _on_offerlink(self, message: Any) -> None:
        assert message.link not in self._ends
        self._ends[message.link] = End(self._replicas[message.link])
        self.wire.post(LinkOffered(message.link, f"trainer {self.rank}"))

    def _on_formlink(self, message: Any) -> None:
        end = self._ends.get(message.link)
        if end is not None:
            self.start(lambda: self._form(end, message.link))

    def _form(self, end: End, link: int) -> bool:
        if end.replica.broken or self._fails(end) or end.aborted:
            self.wire.post(LinkFailed(link, Fault("PeerError", "no window")))
        else:
            end.formed = True
            self.wire.post(LinkReady(link))
        return True

    def _on_droplink(self, message: Any) -> None:
        end = self._ends.pop(message.link, None)
        if end is not None:
            end.aborted = True

    def _on_layout(self, message: Any) -> None:
        self._layouts.put(message.digest, None)

    def _on_agree(self, message: Any) -> None:
        end = self._ends.get(message.link)
        if end is not None:
            assert message.layout in self._layouts, "a layout that was not told"
            assert end.formed
            self.start(lambda: self._plan(end, message))

    def _plan(self, end: End, message: Any) -> bool:
        end.planned.add(message.layout)
        fault = Fault("PeerError", "no memory") if self._fails(end) else None
        self.wire.post(Agreed(message.link, message.number, ANSWER, fault))
        return True

    def _fails(self, end: End) -> bool:
        """Whether it is broken for once; that concerns this replica."""
        if not self.faulty:
            return False
        self.faulty = False
        end.replica.disturb()
        return True

    def _reading(self, push: int) -> Call | None:
        call = self.call
        if call is None or call.number != push or call.cancelled:
            return None
        call.readers += 1
        return call

    def _on_verify(self, message: Any) -> None:
        call = self._reading(message.push)
        if call is not None:
            self.start(lambda: self._verify(call, message))

    def _verify(self, call: Call, message: Any) -> bool:
        call.readers -= 1
        digests = (bytes(16),) * len(message.pieces)
        self.wire.post(Verified(message.push, digests))
        return True

    def _on_put(self, message: Any) -> None:
        assert self._layouts.use(message.layout), "a layout that was not told"
        end = self._ends.get(message.link)
        call = None if end is None else self._reading(message.push)
        if end is None or call is None:
            none = () if end is None else (0,) * len(end.replica.ranks)
            self.wire.post(PutEnded(message.link, message.sequence, none))
            return
        assert end.formed
        assert message.layout in end.planned
        sent = [0] * len(end.replica.ranks)
        self.start(lambda: self._put(call, end, message, sent))

    def _put(self, call: Call, end: End, message: Any, sent: list[int]) -> bool:
        """Send one signal more; two go to each rank."""
        at = sum(sent) // 2
        fault = None
        if at < len(sent) and (end.replica.ranks[at].broken or self._fails(end)):
            fault = Fault("PeerError", f"rank {at} left the group")
        elif end.aborted:
            fault = Fault("ClosedError", "the link was torn down")
        elif at < len(sent) and not self._stops(call, end, message):
            token = Token(message.push, message.version, message.sequence)
            end.replica.ranks[at].take(self.rank, message.slot, token)
            sent[at] += 1
            return False
        call.readers -= 1
        signals = tuple(sent) if fault is None else ()
        self.wire.post(PutEnded(message.link, message.sequence, signals, fault))
        return True

    def _stops(self, call: Call, end: End, message: Any) -> bool:
        return call.over or call.cancelled or message.sequence in end.stopped

    def _on_stop(self, message: Any) -> None:
        if message.link in self._ends:
            self._ends[message.link].stopped.add(message.sequence)

    def _on_pushended(self, message: PushEnded) -> None:
        assert message.push not in self.heard, "the outcome of a push came twice"
        self.heard[message.push] = message
        call = self.call
        if call is not None and call.number == message.push:
            call.over = True
