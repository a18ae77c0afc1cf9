"""A simulated network, and loops whose own work is measured and not simulated.

Time is that of a simulated clock. A loop is busy for the CPU seconds that the real code
takes to decode what arrived, to act on it, and to encode what follows; for each peer
that it hears or speaks to it is charged a call of the kernel on top.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, Final

from weightsync.channel import MAX_FRAME
from weightsync.errors import PeerError, WeightSyncError
from weightsync.framing import frame, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import msgspec

DELAY: Final = 100e-6
"""Seconds that a message is on its way; a connection between hosts of one cluster."""

WAKE: Final = 90e-6
"""CPU seconds of a loop to wake up for one peer and read, or to write to one.

Measured with real channels on one host: 0.19 s for a thousand messages that came and
went alone, half of it for either direction.
"""


class Clock:
    """What happens when, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[..., None], *what: Any) -> None:
        """Let something happen at a time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act, what))

    def step(self) -> bool:
        """Let the next thing happen; whether there was one."""
        if self._events:
            self.now, _, act, what = heapq.heappop(self._events)
            act(*what)
            return True
        return False

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self._events and self._events[0][0] <= until:
            self.step()
        self.now = max(self.now, until)


class Timer:
    """A call that a loop has to make; stands in for a ``CancelScope``."""

    __slots__ = ("act", "cancelled")

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.cancelled = False

    def cancel(self) -> None:
        """Let it not happen."""
        self.cancelled = True


class Line:
    """A loop's end of a channel; stands in for ``Peer``.

    ``deliver`` gets the messages that were written together, and their frames.
    """

    lease = 10.0
    silent = 0.0

    def __init__(
        self, loop: Loop, name: str, deliver: Callable[[list[Any], list[Any]], None]
    ) -> None:
        self.name = name
        self.lost: WeightSyncError | None = None
        self.handle: Callable[[Any], None] = lambda _: None
        self.ended: Callable[[WeightSyncError], None] = lambda _: None
        self.deliver: Final = deliver
        self.decoder: msgspec.msgpack.Decoder[Any] = loop.decoder
        self.outbox: list[Any] = []
        self.inbox: list[Any] = []
        self._loop: Final = loop

    def post(self, message: object) -> None:
        """Queue a message."""
        if self.lost is None:
            if not self.outbox:
                self._loop.dirty.append(self)
            self.outbox.append(message)

    def finish(self) -> None:
        """Nothing follows."""

    def drop(self, error: WeightSyncError) -> None:
        """End the conversation."""
        if self.lost is None:
            self.lost = error
            self.ended(error)

    def arrive(self, frames: Sequence[Any]) -> None:
        """Frames are here, to be read when the loop comes to it."""
        self._loop.hear(self, frames)

    def close(self, reason: str) -> None:
        """The other side is gone."""
        self._loop.call(lambda: self.drop(PeerError(reason)))


class Loop:
    """An event loop of one process, with the work that it has done."""

    def __init__(self, clock: Clock, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.clock: Final = clock
        self.decoder: Final = decoder
        self.free = 0.0
        self.busy = 0.0
        self.received = 0
        self.sent = 0
        self.dirty: list[Line] = []
        self._heard: dict[Line, None] = {}
        self._calls: list[Callable[[], None]] = []
        self._awake = False

    def after(self, seconds: float, act: Callable[[], None]) -> Any:
        """Call back after some simulated seconds."""
        timer = Timer(act)
        when = max(self.clock.now, self.free) + seconds
        self.clock.at(when, self._due, timer)
        return timer

    def hear(self, line: Line, frames: Iterable[Any]) -> None:
        """Something arrived."""
        line.inbox += frames
        self._heard[line] = None
        self._wake()

    def call(self, act: Callable[[], None]) -> None:
        """Let the loop do something when it comes to it."""
        self._calls.append(act)
        self._wake()

    def _due(self, timer: Timer) -> None:
        if not timer.cancelled:
            self.call(timer.act)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.clock.at(max(self.clock.now, self.free), self._turn)

    def _turn(self) -> None:
        """Do all that there is to do, and be busy for as long as that takes."""
        heard, self._heard = self._heard, {}
        calls, self._calls = self._calls, []
        self._awake = False
        began = time.process_time()
        for act in calls:
            act()
        for line in heard:
            self._read(line)
        written = [self._write(line) for line in self.dirty]
        self.dirty = []
        seconds = time.process_time() - began + WAKE * (len(heard) + len(written))
        self.busy += seconds
        self.free = self.clock.now + seconds
        for deliver, messages, frames in written:
            self.clock.at(self.free + DELAY, deliver, messages, frames)

    def _read(self, line: Line) -> None:
        frames, line.inbox = line.inbox, []
        self.received += len(frames)
        for each in frames:
            message = line.decoder.decode(memoryview(each)[4:])
            if line.lost is None:
                try:
                    line.handle(message)
                except WeightSyncError as error:
                    line.drop(error)

    def _write(self, line: Line) -> tuple[Any, list[Any], list[Any]]:
        messages, line.outbox = line.outbox, []
        self.sent += len(messages)
        frames = [frame(message, MAX_FRAME) for message in messages]
        for _ in joined(frames):
            pass
        return line.deliver, messages, frames


def framed(message: object) -> bytes:
    """Encode what a simulated party says."""
    return bytes(frame(message, MAX_FRAME))
