"""One link: a process group of all trainer ranks and the ranks of one replica.

Trainer ranks come first. Each rank plans its own pairs from the same manifests. The
leader compares digests of these plans before anything moves, and each header carries
the digest of its pair, so a disagreement is an error and not a hang.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync.engine import Goods
from weightsync.errors import ClosedError, PeerError, ProtocolError
from weightsync.plan import make_plan
from weightsync.prepared import Prepared, slots_of
from weightsync.quarantine import end
from weightsync.remembered import Remembered
from weightsync.segmented import SegmentedWindow
from weightsync.sending import Addressed
from weightsync.slots import HEADER_BYTES, Header, Slots

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from weightsync.engine import Engine
    from weightsync.memory import Memory
    from weightsync.messages import Expect, FormLink, Layout, Put
    from weightsync.operation import Operation
    from weightsync.sending import Parcel, Sending
    from weightsync.spec import Manifest
    from weightsync.window import Window

_PROCESS: Final = re.compile(r"\brank (\d+) (?=\(process \d+\))")


class Link:
    """What both ends have in common: the group, its window, the layouts known.

    The end of a trainer rank or of a generator rank, which plans the pairs of that.
    """

    def __init__(
        self,
        layouts: Remembered[bytes, Layout],
        engine: Engine,
        *,
        trainer: int | None = None,
        generator: int | None = None,
    ) -> None:
        self.engine: Final = engine
        self.group: Any = engine.group(first=trainer == 0)
        self.handle: Final[str] = self.group.get_reconfigure_handle()
        self.trainers = 0
        self.set_apart = False
        self._aborted = False
        self._ends: Final = {"trainer": trainer, "generator": generator}
        self._replica: tuple[Manifest, ...] = ()
        self._all_slots: Sequence[Slots] = ()
        self._layouts: Final = layouts
        self._plans: Remembered[bytes, Prepared] = Remembered()
        self._window: Window | None = None

    @property
    def window(self) -> Window:
        """The window; ClosedError before the link is formed."""
        if self._window is None:
            raise ClosedError("the link is not formed")
        return self._window

    def form(
        self, form: FormLink, memory: Sequence[Tensor], slots: Sequence[Slots]
    ) -> None:
        """Meet the other ranks and register this rank's memory. Blocks.

        ``memory`` is for each segment of the rank that has most of them, and for what
        trainer ranks put straight from; ``slots`` are those of all ranks of the
        replica.
        Raises ClosedError after ``abort``, which ends only what has begun.
        """
        if self._aborted:
            raise ClosedError(f"{self!r} was dropped")
        options = ReconfigureOptions()
        options.uuid = form.uuid
        options.handles = list(form.handles)
        options.timeout = timedelta(seconds=form.seconds)
        self.group.set_timeout(timedelta(seconds=form.seconds))
        with self.engine.here():
            self.group.reconfigure(options).wait()
            if len(memory) == 1:
                self._window = self.engine.window(self.group, memory[0])
            else:
                segments = enumerate([one.segments for one in slots], form.trainers)
                self._window = SegmentedWindow(self.group, memory, dict(segments))
        self.trainers = form.trainers
        self._replica = form.manifests
        self._all_slots = slots

    def abort(self) -> None:
        """End every operation of this link, soon. Idempotent; blocks briefly.

        ``set_apart`` then says whether NCCL could not be ended.
        """
        self._aborted = True
        if not self.set_apart:
            self.set_apart = not end(self.group, repr(self))

    def dispose(self) -> None:
        """Let go of the window's memory; after ``abort``."""
        self._window = None

    @contextmanager
    def naming(self) -> Generator[None]:
        """Let errors name trainer and generator ranks.

        The process group numbers all of them together, which means nothing to a user.
        """
        try:
            yield
        except PeerError as error:
            raise PeerError(_PROCESS.sub(self._role, str(error))) from error

    def _role(self, found: re.Match[str]) -> str:
        rank = int(found[1])
        if rank < self.trainers:
            return f"trainer rank {rank} "
        return f"generator rank {rank - self.trainers} "

    def plan(self, layout: bytes) -> Prepared:
        """Make or find the plan of this rank's own pairs; that is no use of the layout.

        Takes seconds for a large model, and may run beside the loop, in a thread. Every
        push calls it: a plan that was made for the agreement, and is not forgotten by
        then, is found. The link must be formed.

        Raises ProtocolError for a layout that was never sent, or is forgotten.
        """
        if layout not in self._layouts:
            raise ProtocolError(f"layout {layout.hex()} was never sent")
        prepared = self._plans.get(layout)
        if prepared is None:
            trainers = self._layouts[layout].manifests
            plan = make_plan(trainers, self._replica, **self._ends)
            prepared = Prepared(plan, self.engine, self._all_slots)
        self._plans.put(layout, prepared)
        return prepared


class TrainerLink(Link):
    """A trainer rank's end: it puts. All links of a rank share ``layouts``."""

    def __init__(
        self,
        rank: int,
        layouts: Remembered[bytes, Layout],
        engine: Engine,
        replica: str = "",
    ) -> None:
        super().__init__(layouts, engine, trainer=rank)
        self.replica: Final = replica
        self._rank: Final = rank
        self._scratch: Any = None
        self._sending: Sending | None = None
        self._turn = anyio.Lock()
        self._sequence = 0
        self._stopped = 0

    def __repr__(self) -> str:
        """Show both ends."""
        return f"<link of trainer rank {self._rank} to replica {self.replica!r}>"

    def join(self, form: FormLink) -> None:
        """Form the link and map the windows of the replica. Blocks."""
        slots = slots_of(form)
        share = self.engine.share(self.group, slots)
        self._scratch = share.scratch
        sources = self.engine.sources
        more = self.engine.filling(self.group, form.sources - len(sources))
        self.form(form, [*share.memory, *sources, *more], slots)
        generators = range(form.trainers, form.trainers + len(form.manifests))
        self.window.connect(list(generators))

    def plan(self, layout: bytes) -> Prepared:
        """Make or find the plan, and with it all that the first put would do else."""
        prepared = super().plan(layout)
        if not prepared.parcels:
            pushed = len(self._layouts[layout].manifests[self._rank].names)
            counts = [slots.count for slots in self._all_slots]
            for slot in range(max(counts, default=0)):
                prepared.parcels[slot] = self._parcels(prepared, slot, pushed)
                for parcel in prepared.parcels[slot].values():
                    for runs in parcel.tables:
                        self.window.prepare(runs, parcel.peer)
        return prepared

    async def put(
        self, put: Put, tensors: Sequence[Tensor], after: Any = None
    ) -> tuple[int, ...]:
        """Put this rank's runs and headers; return the signals sent to each rank.

        The values are final ``after`` a mark of the engine.
        After ``stop`` it returns what was sent until then; no tensor is read any more.
        Raises PeerError when a rank of the replica is gone, PlanError for a tensor that
        has lost its memory.
        """
        # The next may begin while the end of this one has still to be noticed here.
        async with self._turn:
            prepared = self.plan(put.layout)
            sending = self.engine.sending(
                self.window, self.ranks, self._scratch, self.naming
            )
            sending.after = after
            self._sequence, self._sending = put.sequence, sending
            if put.sequence <= self._stopped:
                sending.stop()
            names = self._layouts[put.layout].manifests[self._rank].names
            try:
                addressed = self._addressed(put, prepared)
                await sending.run(tensors, addressed, names)
            finally:
                self._sending = None
        if sending.failure is not None:
            raise sending.failure
        return tuple(sending.sent)

    @property
    def ranks(self) -> int:
        """Ranks of the replica."""
        return len(self._replica)

    def stop(self, sequence: int | None = None) -> None:
        """Stop a put between two slices; one that is finished is not affected.

        A ``sequence`` that is still to come is stopped when it begins.
        """
        if sequence is not None:
            self._stopped = max(self._stopped, sequence)
        if self._sending is not None and sequence in {None, self._sequence}:
            self._sending.stop()

    def abort(self) -> None:
        """End every operation of this link, soon. Idempotent; blocks briefly."""
        self.stop()
        super().abort()

    def _addressed(self, put: Put, prepared: Prepared) -> list[Addressed]:
        """What each rank of the replica is sent, if it is sent anything."""
        parcels = prepared.parcels[put.slot]
        return [
            Addressed(rank, parcel, prepared.header(put, self._rank, rank).pack())
            for rank, parcel in parcels.items()
        ]

    def _parcels(self, made: Prepared, slot: int, pushed: int) -> dict[int, Parcel]:
        parcels: dict[int, Parcel] = {}
        for trainer, rank in made.plan.pairs:
            slots, peer = self._all_slots[rank], self.trainers + rank
            goods = Goods(
                peer,
                made.runs(trainer, rank),
                made.plan.casts(trainer, rank),
                slots.data(slot),
                slots.header(slot, trainer),
                pushed,
            )
            parcels[rank] = self.engine.parcel(goods)
        return parcels


class GeneratorLink(Link):
    """A generator rank's end: it waits for signals."""

    def __init__(self, rank: int, slots: Slots, engine: Engine) -> None:
        super().__init__(Remembered(), engine, generator=rank)
        self._rank: Final = rank
        self._slots: Final = slots
        self._names: tuple[bytes, frozenset[str]] | None = None

    def __repr__(self) -> str:
        """Show the rank."""
        return f"<link of generator rank {self._rank}>"

    def join(self, form: FormLink, memory: Memory) -> None:
        """Form the link with the memory of this rank's window. Blocks.

        For segments that only another rank of the replica has, and for what trainer
        ranks put straight from, it brings what fills in.
        """
        slots: Sequence[Slots] = [self._slots] * len(form.manifests)
        if any(form.segments):
            slots = slots_of(form)
        count = max([len(one.segments.starts) for one in slots]) + form.sources
        more = self.engine.filling(self.group, count - len(memory.tensors))
        self.form(form, [*memory.tensors, *more], slots)

    def learn(self, layout: Layout) -> None:
        """Remember the manifests of the trainer ranks for the pushes to come."""
        self._layouts.put(layout.digest, layout)

    def use(self, layout: bytes) -> None:
        """A version in this layout is on its way."""
        self._layouts.use(layout)

    def await_signals(
        self, expect: Expect, announced: Sequence[Sequence[int]] | None = None
    ) -> tuple[Operation, Prepared]:
        """Start to wait for exactly the signals that the plan promises.

        Raises ProtocolError where others were ``announced``: nothing is waited for.
        """
        prepared = self.plan(expect.layout)
        counts = [prepared.signals(t, self._rank) for t in range(self.trainers)]
        if announced is not None and list(announced[self._rank]) != counts:
            message = (
                f"trainer ranks put {list(announced[self._rank])} times; expected "
                f"{counts}"
            )
            raise ProtocolError(message)
        return self.take_signals(counts), prepared

    def take_signals(
        self, counts: Sequence[int], timeout: float | None = None
    ) -> Operation:
        """Start to wait for so many signals of each trainer rank."""
        expected = {trainer: count for trainer, count in enumerate(counts) if count}
        return self.window.wait_signals(expected, timeout=timeout)

    def check_headers(self, expect: Expect, prepared: Prepared, slot: int) -> int:
        """Compare all headers with what was announced; return the bytes received.

        Raises ProtocolError naming the trainer rank whose header differs.
        """
        total = 0
        first = self._slots.header(slot, 0)
        end = self._slots.header(slot, self.trainers)
        memory = self.engine.read(self.window.local[first:end])
        for trainer in range(self.trainers):
            if not prepared.signals(trainer, self._rank):
                continue
            at = trainer * HEADER_BYTES
            found = Header.unpack(memory[at : at + HEADER_BYTES])
            wanted = prepared.header(expect, trainer, self._rank)
            if found != wanted:
                message = f"trainer rank {trainer} put {found}; expected {wanted}"
                raise ProtocolError(message)
            total += wanted.nbytes
        return total

    def pushed_names(self, layout: bytes) -> frozenset[str]:
        """Names that any trainer rank pushes in a layout."""
        if self._names is None or self._names[0] != layout:
            manifests = self._layouts[layout].manifests
            names = frozenset(name for m in manifests for name in m.names)
            self._names = layout, names
        return self._names[1]
