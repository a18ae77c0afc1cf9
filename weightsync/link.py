"""One link: a process group of all trainer ranks and the ranks of one replica.

Trainer ranks come first. Each side makes its own plan from the same manifests, and both
compare its digest with the leader's, so a disagreement is an error and not a hang.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync.backend import create_shm
from weightsync.epoch import Mode
from weightsync.errors import (
    ClosedError,
    PeerError,
    ProtocolError,
    WeightSyncError,
)
from weightsync.messages import Remembered
from weightsync.plan import Plan, make_plan
from weightsync.slots import HEADER_BYTES, Header, Slots, table
from weightsync.window import Window

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from weightsync.messages import Expect, FormLink, Layout, Put
    from weightsync.spec import Manifest
    from weightsync.window import Operation

TRAINER_WINDOW: Final = 64
"""Bytes of a trainer rank's window: nobody puts into it, but every rank has one."""

_PROCESS: Final = re.compile(r"\brank (\d+) (?=\(process \d+\))")


class Prepared:
    """A plan, and what is derived from it once: totals and tables of runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Final = plan
        self.tables: dict[tuple[int, int], Tensor] = {}
        self._totals: dict[tuple[int, int], tuple[int, int]] = {}

    def totals(self, trainer: int, generator: int) -> tuple[int, int]:
        """Rows and bytes from one rank to another; (0, 0) where nothing moves."""
        pair = (trainer, generator)
        if pair not in self._totals:
            rows = sum([run.rows for run in self.plan.runs(*pair)])
            self._totals[pair] = rows, self.plan.nbytes(*pair)
        return self._totals[pair]

    def signals(self, trainer: int, generator: int) -> int:
        """Signals of one push: one a row and one for the header, if anything moves."""
        rows, _ = self.totals(trainer, generator)
        return rows + 1 if rows else 0

    def header(self, head: Put | Expect, trainer: int, generator: int) -> Header:
        """The header that a trainer rank puts last."""
        rows, nbytes = self.totals(trainer, generator)
        return Header(head.version, head.sequence, rows, nbytes, self.plan.digest)


class Link:
    """What both ends have in common: the group, its window, the layouts known."""

    def __init__(self, layouts: Remembered[bytes, Layout]) -> None:
        self.group: Any = create_shm(None, enable_reconfigure=True)
        self.handle: Final[str] = self.group.get_reconfigure_handle()
        self.trainers = 0
        self._layouts: Final = layouts
        self._plans: Remembered[bytes, Prepared] = Remembered()
        self._window: Window | None = None

    @property
    def window(self) -> Window:
        """The window; ClosedError before the link is formed."""
        if self._window is None:
            raise ClosedError("the link is not formed")
        return self._window

    def form(self, form: FormLink, memory: Tensor) -> None:
        """Meet the other ranks and register this rank's memory. Blocks."""
        options = ReconfigureOptions()
        options.uuid = form.uuid
        options.handles = list(form.handles)
        options.timeout = timedelta(seconds=form.seconds)
        self.group.set_timeout(timedelta(seconds=form.seconds))
        self.group.reconfigure(options).wait()
        self._window = Window(self.group, memory)
        self.trainers = form.trainers

    def abort(self) -> None:
        """End every operation of this link, soon. Idempotent; blocks briefly."""
        self.group.abort()

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

    def prepare(self, head: Put | Expect, replica: Sequence[Manifest]) -> Prepared:
        """Make or find the plan of a push; ProtocolError if it is not the leader's."""
        if not self._layouts.use(head.layout):
            raise ProtocolError("a push names a layout that was never sent")
        if not self._plans.use(head.layout):
            manifests = self._layouts[head.layout].manifests
            self._plans.put(head.layout, Prepared(make_plan(manifests, replica)))
        prepared = self._plans[head.layout]
        if (mine := prepared.plan.digest) != head.plan:
            raise ProtocolError(
                f"this rank plans {mine.hex()}, the leader {head.plan.hex()}"
            )
        return prepared


class TrainerLink(Link):
    """A trainer rank's end: it puts. All links of a rank share ``layouts``."""

    def __init__(self, rank: int, layouts: Remembered[bytes, Layout]) -> None:
        super().__init__(layouts)
        self._rank: Final = rank
        self._replica: tuple[Manifest, ...] = ()
        self._slots: list[Slots] = []
        self._operations: dict[int, Operation] = {}
        self._sequence = 0

    def join(self, form: FormLink) -> None:
        """Form the link and map the windows of the replica. Blocks."""
        self._replica = form.manifests
        mode = Mode(form.mode)
        self._slots = [Slots.of(mode, manifest) for manifest in form.manifests]
        self.form(form, Window.allocate(self.group, TRAINER_WINDOW))
        generators = range(form.trainers, form.trainers + len(form.manifests))
        self.window.connect(list(generators))

    async def put(self, put: Put, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Put this rank's runs and headers; return the signals sent to each rank.

        After ``stop`` it returns what was sent until then. Raises PeerError when a rank
        of the replica is gone.
        """
        prepared = self.prepare(put, self._replica)
        self._sequence = put.sequence
        ranks = range(len(self._replica))
        busy = [rank for rank in ranks if prepared.signals(self._rank, rank)]
        sent = [0] * len(self._replica)
        failure = self._start_all(put, prepared, busy, tensors)
        try:
            for rank, operation in self._operations.items():
                try:
                    if await self._went_through(operation):
                        sent[rank] = prepared.signals(self._rank, rank)
                except PeerError as error:
                    failure = failure or error
                    self.stop()
        finally:
            self.stop()
            self._operations = {}
        if failure is not None:
            raise failure
        return tuple(sent)

    @property
    def ranks(self) -> int:
        """Ranks of the replica."""
        return len(self._replica)

    def stop(self, sequence: int | None = None) -> None:
        """Stop a put between two slices; one that is finished is not affected."""
        if sequence is None or sequence == self._sequence:
            for operation in self._operations.values():
                operation.abort()

    def _start_all(
        self,
        put: Put,
        prepared: Prepared,
        generators: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> WeightSyncError | None:
        """Start to put; where that fails, stop what is started and return why."""
        try:
            with self.naming():
                for rank in generators:
                    self._operations[rank] = self._start(put, prepared, rank, tensors)
        except WeightSyncError as error:
            self.stop()
            return error
        return None

    async def _went_through(self, operation: Operation) -> bool:
        """Await a put; False where it was stopped."""
        try:
            with self.naming():
                await operation
        except ClosedError:
            return False
        return True

    def _start(
        self, put: Put, prepared: Prepared, generator: int, tensors: Sequence[Tensor]
    ) -> Operation:
        key = (generator, put.slot)
        if key not in prepared.tables:
            plan = prepared.plan
            prepared.tables[key] = self._table(plan, *key, header=len(tensors))
        header = prepared.header(put, self._rank, generator).pack()
        return self.window.put_many(
            [*tensors, header], prepared.tables[key], self.trainers + generator
        )

    def _table(self, plan: Plan, generator: int, slot: int, *, header: int) -> Tensor:
        slots = self._slots[generator]
        rows = table(plan.runs(self._rank, generator), slots.data(slot))
        at = slots.header(slot, self._rank)
        last = [header, 0, at, 1, HEADER_BYTES, HEADER_BYTES, HEADER_BYTES]
        return torch.cat([rows, torch.tensor([last], dtype=torch.int64)])


class GeneratorLink(Link):
    """A generator rank's end: it waits for signals."""

    def __init__(self, rank: int, slots: Slots) -> None:
        super().__init__(Remembered())
        self._rank: Final = rank
        self._slots: Final = slots
        self._names: tuple[bytes, frozenset[str]] | None = None

    def learn(self, layout: Layout) -> None:
        """Remember the manifests of the trainer ranks for the pushes to come."""
        self._layouts.put(layout.digest, layout)

    def await_signals(
        self, expect: Expect, replica: Sequence[Manifest]
    ) -> tuple[Operation, Prepared]:
        """Start to wait for exactly the signals that the plan promises."""
        prepared = self.prepare(expect, replica)
        counts = {t: prepared.signals(t, self._rank) for t in range(self.trainers)}
        expected = {trainer: count for trainer, count in counts.items() if count}
        return self.window.wait_signals(expected), prepared

    def check_headers(self, expect: Expect, prepared: Prepared, slot: int) -> int:
        """Compare all headers with what was announced; return the bytes received.

        Raises ProtocolError naming the trainer rank whose header differs.
        """
        total = 0
        memory = self.window.local
        for trainer in range(self.trainers):
            if not prepared.signals(trainer, self._rank):
                continue
            at = self._slots.header(slot, trainer)
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
