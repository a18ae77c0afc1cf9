"""The ranks of the chaos suite, as they run in their processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NamedTuple

import anyio
import torch.distributed

import weightsync
from tests.chaos.weights import Weights, generator_boxes, trainer_boxes
from tests.chaos.words import (
    CLOSE_SECONDS,
    OPEN_SECONDS,
    Call,
    Doing,
    Held,
    Replicas,
    Torn,
    census,
    timed,
)
from weightsync.store import open_store, parse_address

if TYPE_CHECKING:
    from tests.chaos.scenario import Join
    from tests.processes.harness import Control

READ_SECONDS = 0.02

AGAIN_SECONDS = 5.0
"""Timeout of a receive that joins again."""

OUT = {"PeerError", "ClosedError"}
"""What says that a replica is out of the pool."""


class Place(NamedTuple):
    """Where a rank belongs, and how large the model is."""

    address: str
    rank: int
    world: int
    rows: int
    device: str
    lease: float
    replay: bool
    proposed: bool


async def trainer(control: Control, place: Place) -> None:
    """Push, propose, look and close as the test says."""
    gc.freeze()
    boxes = trainer_boxes(place.rows, place.rank, place.world)
    weights = Weights(place.rows, boxes, place.device)
    transport = weightsync.Trainer(
        place.address,
        rank=place.rank,
        world_size=place.world,
        timeout=OPEN_SECONDS,
        lease=place.lease,
        replay=place.replay,
        admit="proposed" if place.proposed else "all",
    )
    opened, _ = await timed("open", OPEN_SECONDS, transport.__aenter__())
    control.say(opened)
    if opened.kind != "ok":
        return
    async with anyio.create_task_group() as tasks:
        while (order := await control.ahear()) != "close":
            match order:
                case "replicas":
                    control.say(Replicas(transport.replicas))
                case "census":
                    control.say(census(await anyio.to_thread.run_sync(_keys, place)))
                case "propose", names:
                    tasks.start_soon(_propose, control, transport, names)
                case version, seconds, limit:
                    weights.fill(version)
                    call = await _push(transport, weights, version, seconds)
                    control.say(call._replace(limit=limit))
    closed, _ = await timed("close", CLOSE_SECONDS, transport.aclose())
    control.say(closed)


async def _push(
    transport: weightsync.Trainer, weights: Weights, version: int, seconds: float
) -> Call:
    push = transport.push(weights.state, version=version, timeout=seconds)
    call, report = await timed("push", seconds, push)
    return call._replace(version=version, report=report or call.report)


async def _propose(
    control: Control, transport: weightsync.Trainer, names: tuple[str, ...] | None
) -> None:
    """Propose, beside everything else; what is in force then must be that."""
    proposing = transport.propose(names, timeout=OPEN_SECONDS)
    call, found = await timed("propose", OPEN_SECONDS, proposing)
    proposal = None if found is None else found.proposal
    if call.kind == "ok" and names != (None if proposal is None else proposal.names):
        call = call._replace(kind="wrong", text=f"{proposal} is in force")
    control.say(call)


def _keys(place: Place) -> tuple[str, ...]:
    """Look into the store from outside; on rank 0, where it surely is."""
    if place.rank != 0:
        return ()
    store = open_store(parse_address(place.address), host=False, timeout=OPEN_SECONDS)
    assert isinstance(store, torch.distributed.TCPStore | torch.distributed.FileStore)
    return tuple(sorted(store.list_keys()))


async def generator(
    control: Control, place: Place, join: Join, receive_seconds: float
) -> None:
    """Receive and read until an error or an order to end; then say what is held.

    Who stays receives again after an error that says that it is out of the pool.
    """
    gc.freeze()  # what was imported need not be looked at again, which takes long
    boxes = generator_boxes(place.rows, place.rank, place.world)
    weights = Weights(place.rows, boxes, place.device)
    transport = weightsync.Generator(
        place.address,
        weights.state,
        replica=join.name,
        rank=place.rank,
        world_size=place.world,
        mode=join.mode,
        timeout=OPEN_SECONDS,
        lease=place.lease,
    )
    life = _Life(control, weights, transport, join, receive_seconds)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.obey)
        with life.scope:
            await life.live()


class _Life:
    """A generator rank from its opening to its close."""

    def __init__(
        self,
        control: Control,
        weights: Weights,
        transport: weightsync.Generator,
        join: Join,
        receive_seconds: float,
    ) -> None:
        self.scope = anyio.CancelScope()
        self._control = control
        self._weights = weights
        self._transport = transport
        self._mode = join.mode
        self._stays = join.stays
        self._seconds = receive_seconds

    async def obey(self) -> None:
        """End when the test says so; before that, count what is open if it asks."""
        while await self._control.ahear() == "census":
            self._control.say(census())
        self.scope.cancel()

    async def live(self) -> None:
        self._control.say(Doing("open"))
        opening = self._transport.__aenter__()
        opened, _ = await timed("open", OPEN_SECONDS, opening)
        self._control.say(opened)
        if opened.kind != "ok":
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read)
                await self._receive()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                self._control.say(self._held())
                closing = self._transport.aclose()
                self._control.say((await timed("close", CLOSE_SECONDS, closing))[0])

    async def _receive(self) -> None:
        """Receive until that fails otherwise than by its timeout."""
        kind, seconds = "ok", self._seconds
        while kind in {"ok", "TimedOutError"} or (self._stays and kind in OUT):
            receiving = self._transport.receive(timeout=seconds)
            call, update = await timed("receive", seconds, receiving)
            kind = call.kind
            seconds = AGAIN_SECONDS if kind in OUT else self._seconds
            if update is not None:
                call = call._replace(version=update.version)
                with self._transport.use() as held:
                    wrong = self._weights.wrong(held.version)
                if held.version != update.version:
                    wrong.append(f"version is {held.version}")
                call = call._replace(wrong=tuple(wrong))
            self._control.say(call)

    async def _read(self) -> None:
        """Read again and again, beside everything else."""
        while True:
            await anyio.sleep(READ_SECONDS)
            held = self._held()
            if held.wrong or (held.unreadable and self._mode != "inplace"):
                self._control.say(Torn(held.version, (*held.wrong, held.unreadable)))

    def _held(self) -> Held:
        try:
            with self._transport.use() as held:
                wrong = tuple(self._weights.wrong(held.version))
                return Held(held.version, wrong, "")
        except weightsync.EpochError as error:
            return Held(self._transport.version, (), str(error))
