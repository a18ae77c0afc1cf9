"""Puts straight from the caller's tensors when something goes wrong, or is refused."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes import driven
from tests.processes import test_engine_nccl_matrix_push as matrix
from tests.processes.driven import MIB, Held, call
from tests.processes.rig import on
from tests.processes.test_straight import octets, open_straight, registered
from weightsync import testing
from weightsync.engines import NO_STRAIGHT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.faulty import Pool
    from tests.processes.harness import Control
    from tests.processes.nccl_cases import Case

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.emulated(strict=True),
    pytest.mark.timeout(60),
]


# What is refused


def state(value: int = 0) -> dict[str, Any]:
    return {
        "w": torch.full((4, 6), value, dtype=torch.int32),
        "b": torch.full((5,), value, dtype=torch.int32),
    }


async def _refused(control: Control) -> list[Any]:
    """Push tensors that are not there, beside a rank whose tensors are."""
    pushed = [registered(rank, state(1)) for rank in range(2)]
    weights = on("cuda", 2, state())
    elsewhere = {**pushed[1], "b": pushed[1]["b"].clone()}
    turned = registered(1, {"t": torch.ones(6, 4, dtype=torch.int32)})["t"]
    found: list[Any] = []
    async with open_straight(*pushed) as job:
        before = await job.outcomes(pushed[0], elsewhere, timeout=5)
        generator = await job.join_one(weights)
        found.append([(type(one).__name__, str(one)) for one in before])
        for second in (elsewhere, {**pushed[1], "w": turned.t()}):
            outcomes = await job.outcomes(pushed[0], second, timeout=5)
            found.append([(type(one).__name__, str(one)) for one in outcomes])
        found.append([generator.version, octets(state()) == octets(weights)])
        await job.deliver(generator, *pushed)
    return [*found, octets(state(1)) == octets(weights)]


def test_tensors_elsewhere_are_refused_by_name_before_a_byte_moves(
    processes: EmulatedProcesses,
) -> None:
    *refusals, held, exact = processes.start(_refused).result(60)
    elsewhere = (
        "trainer rank 1: 'b': staging='none' puts straight out of the memory that the "
        "Trainer was given, and these 20 bytes are in other memory of cuda:1"
    )
    turned = (
        "trainer rank 1: 'w': staging='none' puts straight out of its memory, so it "
        "has to be contiguous; found strides (1, 4) of shape (4, 6)"
    )

    for told, outcomes in zip([elsewhere, elsewhere, turned], refusals, strict=True):
        assert [("PlanError", told)] * 2 == [(one[0], one[1]) for one in outcomes]
    assert [None, True] == held
    assert exact


async def _options(control: Control) -> list[tuple[str, str]]:
    plain, there = on("cuda", 0, state()), registered(0, state())
    calls: list[Callable[[], object]] = [
        lambda: trainer(staging="none"),
        lambda: trainer(memory=there),
        lambda: trainer(staging="all"),
        lambda: trainer(staging="none", memory={**there, "b": plain["b"]}),
        lambda: trainer(staging="none", memory=registered(1, state())),
        lambda: trainer(staging="none", memory=there, engine="torch-nccl2"),
        lambda: trainer(staging="none", memory=there, engine="shm"),
    ]
    found: list[tuple[str, str]] = []
    for make in calls:
        with pytest.raises(weightsync.WeightSyncError) as raised:
            make()
        found.append((raised.type.__name__, str(raised.value)))
    return found


def trainer(**options: Any) -> weightsync.Trainer:
    return weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=1, **options)


def test_options_that_cannot_be_are_refused_at_once(
    processes: EmulatedProcesses,
) -> None:
    found = processes.start(_options).result()
    both = "memory= is what staging='none' puts from: give both, or neither"
    elsewhere = (
        "memory: 'b' is in other memory of cuda:0: allocate it in "
        "`with weightsync.nccl_memory():`"
    )

    assert [
        ("PlanError", both),
        ("PlanError", both),
        ("PlanError", "staging is 'copy' or 'none', not 'all'"),
        ("PlanError", elsewhere),
        (
            "PlanError",
            "memory: a tensor of it is on cuda:1, and this rank puts from cuda:0",
        ),
        (
            "UnsupportedError",
            NO_STRAIGHT,
        ),
        (
            "PlanError",
            "memory: a tensor of it is on cuda:0, and this rank puts from the CPU",
        ),
    ] == found


async def _freed(control: Control) -> list[int]:
    """Bytes of the GPU in use: before, with tensors, and when all is dropped."""

    def taken() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    seen = [taken()]
    held = registered(0, {"w": torch.ones(24 * MIB, dtype=torch.uint8)})
    seen.append(taken() - seen[0])
    async with open_straight(held):
        held.clear()
        seen.append(taken() - seen[0])
    del held
    return [*seen[1:], taken() - seen[0]]


def test_memory_is_kept_for_the_trainer_and_then_given_back(
    processes: EmulatedProcesses,
) -> None:
    assert [24 * MIB, 24 * MIB, 0] == processes.start(_freed).result()


# What goes wrong


async def _cancelled(control: Control) -> list[Any]:
    """Cancel a push between its puts, and change its tensors at once."""
    size = 160 * MIB
    pushed = registered(0, {"w": torch.zeros(size, dtype=torch.uint8)})
    weights = on("cuda", 1, {"w": torch.zeros(size, dtype=torch.uint8)})
    host = torch.empty(size, dtype=torch.uint8)
    found: list[Any] = []
    async with open_straight(pushed) as job:
        generator = await job.join_one(weights)
        for version in (1, 2, 3):
            pushed["w"].copy_(host.fill_(version))
            if version != 2:
                await job.deliver(generator, pushed)
                found.append(torch.equal(host, weights["w"].cpu()))
                continue
            before = testing.calls()["ncclPutSignal"]
            async with anyio.create_task_group() as group:
                group.start_soon(job.trainers[0].push, pushed)
                while testing.calls()["ncclPutSignal"] == before:
                    await anyio.sleep(0.001)
                group.cancel_scope.cancel()
            pushed["w"].copy_(host.fill_(99))
            done = testing.calls()["ncclPutSignal"] - before
            found.append((done, generator.version))
    return found


@pytest.mark.slow
def test_a_push_that_is_cancelled_leaves_no_put_behind(
    processes: EmulatedProcesses,
) -> None:
    processes.faults = "put@from=22:delay=0.01"
    first, (done, version), last = processes.start(_cancelled).result(60)

    assert first
    assert last
    assert 0 < done < 21
    assert 1 == version


def test_a_replica_that_dies_while_it_is_put_to_fails_alone(pool: Pool) -> None:
    pool.straight = True
    pool.train()
    stays, dies = pool.join("gen-0"), pool.join("gen-1")
    pool.deliver(1, "gen-0", "gen-1")
    call(dies, "kill_at_first_byte", pid=dies.pid, number=9)
    outcomes = without_one(pool)
    pool.deliver(3, "gen-0")
    pool.join("gen-2")
    pool.deliver(4, "gen-0", "gen-2")

    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert Held(4, 4) == call(stays, "held").value
    assert [] == pool.hangs
    assert pool.close() < 10


def without_one(pool: Pool) -> list[driven.Outcome]:
    """Push version 2 to both replicas, of which "gen-1" dies; the other one has it."""
    pool.begin(2, "gen-0")
    outcomes = pool.pushed()
    received, held = pool.received("gen-0")
    del pool.replicas["gen-1"]

    assert ["ok", "ok"] == [each.kind for each in outcomes], outcomes
    assert ("ok", Held(2, 2)) == (received.kind, held)
    return outcomes


SLOW = "; ".join(f"put@n={number}:delay=0.4" for number in range(7, 13))
"""Puts of the second push, three to each of two replicas: one dies meanwhile."""


@pytest.mark.slow
def test_tensors_may_change_though_a_put_out_of_them_never_ends(pool: Pool) -> None:
    # Of trainer rank 1, whose puts to "gen-1" go through a network. It changes its
    # tensors as soon as each push has returned.
    pool.straight = True
    pool.train(f"network=1-2; {SLOW}; set-apart")
    pool.join("gen-0", "network=1-2")
    broken = pool.join("gen-1", "network=1-2")
    pool.deliver(1, "gen-0", "gen-1")
    call(broken, "kill_at_first_byte", pid=broken.pid, number=9)
    outcomes = without_one(pool)
    told = call(pool.trainers[1], "event", kind="quarantined").value
    pool.deliver(3, "gen-0")
    pool.join("gen-2", "network=1-2")
    pool.deliver(4, "gen-0", "gen-2")

    assert {"gen-1"} == set(outcomes[0].value.failed)
    assert "gen-1" == told.name
    assert [] == pool.hangs
    assert pool.close() < 10


LARGEST = "window_register@n=4:fail=3"
"""Of a trainer rank: what it puts from, for the second replica that joins."""


@pytest.mark.slow
def test_a_link_that_cannot_register_the_tensors_concerns_no_other(pool: Pool) -> None:
    pool.straight = True
    pool.train(LARGEST)
    pool.join("gen-0")
    pool.deliver(1, "gen-0")
    broken = pool.start("gen-1")
    assert "open" == broken.hear()
    refused = call(broken, "receive", timeout=15)
    pool.deliver(2, "gen-0")
    pool.come_back("gen-1", 3)

    assert "PeerError" == refused.kind, refused
    assert "removed from the pool" in refused.value
    assert 1 == pool.faults("trainer-1")
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.slow
@pytest.mark.parametrize("case", matrix.SPOILING, ids=str)
def test_a_push_that_nccl_spoils_is_spoilt_for_one_replica(
    case: Case, pool: Pool
) -> None:
    pool.straight = True
    matrix.test_a_push_that_nccl_spoils_is_spoilt_for_one_replica(case, pool)


@pytest.mark.slow
@pytest.mark.parametrize("case", matrix.DYING, ids=str)
def test_a_trainer_that_dies_at_any_put_leaves_whole_versions(
    case: Case, pool: Pool
) -> None:
    pool.straight = True
    matrix.test_a_trainer_that_dies_at_any_put_leaves_whole_versions(case, pool)
