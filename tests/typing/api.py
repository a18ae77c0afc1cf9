"""What users may write, as the type checkers see it. Checked, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import torch
from torch import nn

import weightsync

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


async def trainer(module: nn.Module) -> None:
    async with weightsync.Trainer(
        "tcp://h:1", rank=0, world_size=2, timeout=5, replay=True, admit="proposed"
    ) as transport:
        assert_type(transport, weightsync.Trainer)
        assert_type(await transport.wait_for_replicas(2, timeout=60), tuple[str, ...])
        report = await transport.push(
            module.state_dict(), version=3, on_busy="skip", require="all"
        )
        assert_type(report, weightsync.PushReport)
        assert_type(report.version, int)
        assert_type(report.replicas["gen-0"].reason, str)
        assert_type(report.delivered, tuple[str, ...])
        membership = await transport.membership(timeout=1.0)
        assert_type(membership, weightsync.Membership)
        assert_type(membership.proposal, weightsync.Proposal | None)
        assert_type(await transport.propose(["gen-0"]), weightsync.Membership)
        assert_type(membership.replicas["gen-0"], weightsync.ReplicaMember)
        assert_type((membership.epoch, membership.term), tuple[int, int])
        assert_type(membership.replicas["gen-0"].push, weightsync.LastPush | None)
        async for event in transport.events(after=membership.number):
            assert_type(event, weightsync.MembershipEvent)


async def without_staging(module: nn.Module) -> None:
    with weightsync.nccl_memory(torch.device("cuda", 0)) as pool:
        assert_type(pool, torch.cuda.MemPool)
    memory = module.state_dict()
    async with weightsync.Trainer("tcp://h:1", staging="none", memory=memory):
        pass
    pairs = module.named_parameters()
    with weightsync.blocking.Trainer("tcp://h:1", staging="none", memory=pairs):
        pass


async def observer() -> None:
    async with weightsync.Observer("tcp://h:1", job="a", lease=5.0) as observer:
        assert_type(await observer.membership(), weightsync.Membership)
        await observer.propose(name for name in ("gen-0", "gen-1"))
        assert_type(await observer.propose(None, timeout=1), weightsync.Membership)
        async for event in observer.events(after=0):
            assert_type(event.reason, str)


async def generator(module: nn.Module) -> None:
    async with weightsync.Generator(
        None, module.state_dict(), replica="gen-0", mode="swap"
    ) as transport:
        assert_type(await transport.receive(timeout=1.0), weightsync.Update)
        assert_type(transport.version, int | None)
        assert_type(transport.pending, int | None)
        async for update in transport:
            assert_type(update.switched, float)
            assert_type(update.epoch, int)
        with transport.use() as weights:
            assert_type(weights, weightsync.Weights)
            assert_type(weights.epoch, int)
            assert_type(weights.tensors["w"], torch.Tensor)
        async with transport.use() as weights:
            assert_type(weights.version, int | None)


def blocking(module: nn.Module) -> None:
    with weightsync.blocking.Trainer("tcp://h:1", epoch=1) as trainer:
        assert_type(trainer.push(module.state_dict()), weightsync.PushReport)
        assert_type(trainer.propose({"gen-0"}), weightsync.Membership)
        for event in trainer.events():
            assert_type(event, weightsync.MembershipEvent)
    with weightsync.blocking.Observer("tcp://h:1") as observer:
        assert_type(observer.membership(), weightsync.Membership)
        assert_type(observer.propose(("gen-0",)), weightsync.Membership)
    shard = weightsync.Shard(torch.zeros(2), global_shape=(4,), offsets=(2,))
    with weightsync.blocking.Generator("tcp://h:1", {"w": shard}) as generator:
        for update in generator:
            assert_type(update, weightsync.Update)


async def window(group: ProcessGroup) -> None:
    memory = weightsync.Window.allocate(group, 64)
    with weightsync.Window(group, memory) as window:
        assert_type(window.put(torch.zeros(4), 1, offset=8), weightsync.Operation)
        await window.wait_signals({0: 2}, timeout=1.0)
        window.wait_signal(0).wait(1.0)
        assert_type(window.local, torch.Tensor)


def errors(error: weightsync.TimedOutError) -> TimeoutError:
    return error


def fenced(error: weightsync.FencedError) -> weightsync.PeerError:
    return error
