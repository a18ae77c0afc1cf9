"""One link: a process group of all trainer ranks and the ranks of one replica.

Trainer ranks come first. Each rank plans its own pairs from the same manifests. The
leader compares digests of these plans before anything moves, and each header carries
the digest of its pair, so a disagreement is an error and not a hang.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import ReconfigureOptions

from weightsync.backend import create_shm
from weightsync.casting import Scratch, batches
from weightsync.epoch import Mode
from weightsync.errors import ClosedError, PeerError, ProtocolError
from weightsync.plan import Plan, make_plan
from weightsync.remembered import Remembered
from weightsync.sending import Addressed, Parcel, Sending
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
    """A plan, and what is derived from it once: totals, and what to put into a slot."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Final = plan
        self.parcels: dict[int, dict[int, Parcel]] = {}
        self._totals: dict[tuple[int, int], tuple[int, int]] = {}

    def totals(self, trainer: int, generator: int) -> tuple[int, int]:
        """Rows and bytes from one rank to another; (0, 0) where nothing moves."""
        pair = (trainer, generator)
        if pair not in self._totals:
            self._totals[pair] = self.plan.rows(*pair), self.plan.nbytes(*pair)
        return self._totals[pair]

    def signals(self, trainer: int, generator: int) -> int:
        """Signals of one push: one a row and one for the header, if anything moves."""
        rows, _ = self.totals(trainer, generator)
        return rows + 1 if rows else 0

    def header(self, head: Put | Expect, trainer: int, generator: int) -> Header:
        """The header that a trainer rank puts last."""
        rows, nbytes = self.totals(trainer, generator)
        digest = self.plan.digests[trainer, generator]
        return Header(head.version, head.sequence, rows, nbytes, digest)


class Link:
    """What both ends have in common: the group, its window, the layouts known.

    The end of a trainer rank or of a generator rank, which plans the pairs of that.
    """

    def __init__(
        self,
        layouts: Remembered[bytes, Layout],
        *,
        trainer: int | None = None,
        generator: int | None = None,
    ) -> None:
        self.group: Any = create_shm(None, enable_reconfigure=True)
        self.handle: Final[str] = self.group.get_reconfigure_handle()
        self.trainers = 0
        self._ends: Final = {"trainer": trainer, "generator": generator}
        self._replica: tuple[Manifest, ...] = ()
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
        self._replica = form.manifests

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

    def plan(self, layout: bytes) -> Prepared:
        """Make or find the plan of this rank's own pairs; a use of the layout.

        Takes seconds for a large model, and may run beside the loop, in a thread. Every
        push calls it: a plan that was made for the agreement, and is not forgotten by
        then, is found. The link must be formed.

        Raises ProtocolError for a layout that was never sent, or is forgotten.
        """
        if not self._layouts.use(layout):
            raise ProtocolError(f"layout {layout.hex()} was never sent")
        prepared = self._plans.get(layout)
        if prepared is None:
            trainers = self._layouts[layout].manifests
            prepared = Prepared(make_plan(trainers, self._replica, **self._ends))
        self._plans.put(layout, prepared)
        return prepared


class TrainerLink(Link):
    """A trainer rank's end: it puts. All links of a rank share ``layouts``."""

    def __init__(self, rank: int, layouts: Remembered[bytes, Layout]) -> None:
        super().__init__(layouts, trainer=rank)
        self._rank: Final = rank
        self._slots: list[Slots] = []
        self._scratch: Final = Scratch()
        self._sending: Sending | None = None
        self._sequence = 0
        self._stopped = 0

    def join(self, form: FormLink) -> None:
        """Form the link and map the windows of the replica. Blocks."""
        mode = Mode(form.mode)
        self._slots = [Slots.of(mode, manifest) for manifest in form.manifests]
        self.form(form, Window.allocate(self.group, TRAINER_WINDOW))
        generators = range(form.trainers, form.trainers + len(form.manifests))
        self.window.connect(list(generators))

    def plan(self, layout: bytes) -> Prepared:
        """Make or find the plan, and with it all that the first put would do else."""
        prepared = super().plan(layout)
        if not prepared.parcels:
            pushed = len(self._layouts[layout].manifests[self._rank].names)
            for slot in range(max([slots.count for slots in self._slots], default=0)):
                prepared.parcels[slot] = self._parcels(prepared.plan, slot, pushed)
                for parcel in prepared.parcels[slot].values():
                    for runs in parcel.tables:
                        self.window.prepare(runs, parcel.peer)
        return prepared

    async def put(self, put: Put, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Put this rank's runs and headers; return the signals sent to each rank.

        After ``stop`` it returns what was sent until then; no tensor is read any more.
        Raises PeerError when a rank of the replica is gone, PlanError for a tensor that
        has lost its memory.
        """
        prepared = self.plan(put.layout)
        sending = Sending(self.window, self.ranks, self._scratch, self.naming)
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

    def _parcels(self, plan: Plan, slot: int, pushed: int) -> dict[int, Parcel]:
        parcels: dict[int, Parcel] = {}
        for trainer, rank in plan.pairs:
            slots = self._slots[rank]
            at, base = slots.header(slot, trainer), slots.data(slot)
            runs = table(plan.runs(trainer, rank), base)
            casts = batches(plan.casts(trainer, rank), base)
            peer = self.trainers + rank
            if casts:
                last = replace(casts[-1], runs=_and_header(casts[-1].runs, 1, at))
                exact = runs if len(runs) else None
                parcels[rank] = Parcel(peer, exact, (*casts[:-1], last))
            else:
                parcels[rank] = Parcel(peer, _and_header(runs, pushed, at), ())
        return parcels


def _and_header(runs: Tensor, tensor: int, at: int) -> Tensor:
    """Append to a table the run that puts the header, which is this tensor."""
    last = [tensor, 0, at, 1, HEADER_BYTES, HEADER_BYTES, HEADER_BYTES]
    return torch.cat([runs, torch.tensor([last], dtype=torch.int64)])


class GeneratorLink(Link):
    """A generator rank's end: it waits for signals."""

    def __init__(self, rank: int, slots: Slots) -> None:
        super().__init__(Remembered(), generator=rank)
        self._rank: Final = rank
        self._slots: Final = slots
        self._names: tuple[bytes, frozenset[str]] | None = None

    def learn(self, layout: Layout) -> None:
        """Remember the manifests of the trainer ranks for the pushes to come."""
        self._layouts.put(layout.digest, layout)

    def await_signals(self, expect: Expect) -> tuple[Operation, Prepared]:
        """Start to wait for exactly the signals that the plan promises."""
        prepared = self.plan(expect.layout)
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
