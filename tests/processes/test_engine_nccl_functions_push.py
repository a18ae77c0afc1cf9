"""What becomes of a push in which a function of CUDA or NCCL fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.emulator.leftovers import eventually
from tests.processes import nccl_functions
from tests.processes.driven import Held, call
from tests.processes.nccl_cases import Case, parameters
from tests.processes.nccl_functions import cases
from tests.processes.rig import on, open_job, together
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.driven import Outcome
    from tests.processes.emulated import EmulatedProcesses
    from tests.processes.faulty import Pool
    from tests.processes.harness import Control
    from tests.processes.rig import Job

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.emulated,
    pytest.mark.timeout(60),
]

NAMES = ("gen-0", "gen-1")
FAILURES = {"PeerError", "WeightSyncError"}


def full(pool: Pool) -> None:
    """Two trainer ranks and two replicas that hold version 1."""
    pool.train()
    for name in NAMES:
        pool.join(name)
    pool.deliver(1, *NAMES)


def push(pool: Pool) -> tuple[list[Outcome], dict[str, tuple[Outcome, Held]]]:
    """Push version 2; return how that ended on each trainer rank and each replica."""
    pool.begin(2, *NAMES)
    outcomes = pool.pushed()
    got = {name: pool.received(name) for name in NAMES}

    assert ["ok", "ok"] == [each.kind for each in outcomes], outcomes
    assert outcomes[0].value == outcomes[1].value
    return outcomes, got


@pytest.mark.parametrize(
    "case",
    parameters(
        cases(nccl_functions.SPOILING), "trainer: cudaLaunchHostFunc@n=1:fail=999"
    ),
)
def test_a_function_that_fails_spoils_a_push_for_one_replica(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    full(pool)
    pool.inject(case.log, case.faults)
    outcomes, got = push(pool)
    ((failed, reason),) = outcomes[0].value.failed.items()
    (other,) = set(NAMES) - {failed}
    pool.come_back(failed, 3)

    assert case.who == "trainer" or failed == "gen-1"
    assert case.function.removesuffix("WithFlags") in reason
    assert ("ok", Held(2, 2)) == (got[other][0].kind, got[other][1])
    assert got[failed][0].kind in FAILURES
    assert Held(1, 1) == got[failed][1]
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.REFUSING)))
def test_a_function_that_fails_before_anything_is_put_fails_the_push_on_all_ranks(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    full(pool)
    pool.inject(case.log, case.faults)
    pool.begin(2)
    outcomes = pool.pushed()
    held = [call(pool.replicas[name], "held").value for name in NAMES]
    pool.deliver(3, *NAMES)

    assert ["WeightSyncError"] * 2 == [each.kind for each in outcomes], outcomes
    assert outcomes[0].value == outcomes[1].value
    assert "trainer rank 1: " in outcomes[0].value
    assert case.function in outcomes[0].value
    assert [Held(1, 1)] * 2 == held
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize(
    "case",
    parameters(
        cases(nccl_functions.SWITCHING), "generator: cudaMemcpyAsync@n=2:fail=999"
    ),
)
def test_a_replica_whose_switch_fails_says_so_and_comes_back(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    full(pool)
    pool.inject(case.log, case.faults)
    outcomes, got = push(pool)
    pool.come_back("gen-1", 3)

    assert set(NAMES) == set(outcomes[0].value.delivered)
    assert ("ok", Held(2, 2)) == (got["gen-0"][0].kind, got["gen-0"][1])
    assert "WeightSyncError" == got["gen-1"][0].kind
    assert case.function in got["gen-1"][0].value
    assert got["gen-1"][1].version is None
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.EITHER)))
def test_a_function_that_fails_for_whoever_asks_spoils_one_replica_at_most(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    full(pool)
    pool.inject(case.log, case.faults)
    outcomes, got = push(pool)
    failed = [name for name in NAMES if got[name][0].kind != "ok"]
    for name in failed:
        pool.come_back(name, 3)
    if not failed:
        pool.deliver(3, *NAMES)

    assert len(failed) <= 1
    assert failed == list(outcomes[0].value.failed)
    assert {Held(1, 1) if name in failed else Held(2, 2) for name in NAMES} == {
        held for _, held in got.values()
    }
    assert 1 == pool.faults(case.log)
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize("case", parameters(cases(nccl_functions.ASKING)))
def test_a_link_that_cannot_be_asked_for_errors_fails_in_the_next_push(
    case: Case, pool: Pool
) -> None:
    pool.nccl = case.nccl
    full(pool)
    pool.inject(case.log, case.faults, now=True)
    fired = eventually(lambda: pool.faults(case.log) == 1)
    outcomes, got = push(pool)
    ((failed, reason),) = outcomes[0].value.failed.items()
    pool.come_back(failed, 3)

    assert fired
    assert case.function in reason
    assert {"ok"} == {got[name][0].kind for name in NAMES if name != failed}
    assert Held(1, 1) == got[failed][1]
    assert [] == pool.hangs
    assert pool.close() < 10


# In one process, where everything is on GPUs of its own

ROWS = 64
COLUMNS = 48
SEGMENT = 4096
"""So that there are several of it."""


def matrix(version: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, -1) + version


def halves() -> list[dict[str, weightsync.Shard]]:
    """Two shards of columns, on the GPUs after the first two."""
    empty = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.int32)
    shape = (ROWS, COLUMNS)
    return [
        on(
            "cuda",
            2 + rank,
            {
                "m": weightsync.Shard(
                    empty.clone(), global_shape=shape, offsets=(0, left)
                )
            },
        )
        for rank, left in enumerate((0, COLUMNS // 2))
    ]


def pushed(version: int) -> dict[str, torch.Tensor]:
    return on("cuda", 0, {"m": matrix(version)})


def exact(version: int, *ranks: dict[str, Any]) -> bool:
    """Whether these ranks hold that version, side by side."""
    held = [rank["m"] for rank in ranks]
    parts = [getattr(one, "tensor", one).cpu() for one in held]
    return torch.equal(matrix(version), torch.cat(parts, dim=1))


async def _rows(control: Control, faults: str) -> list[Any]:
    """Push rows to columns, of which each is a copy by itself, and to a whole."""
    whole, columns = on("cuda", 1, {"m": matrix(0) * 0}), halves()
    async with open_job(1, "cuda") as job:
        other = await job.join_one(whole)
        ranks = await job.join(*columns)
        await job.deliver([other, *ranks], pushed(1))
        testing.inject(faults)
        (report,) = await job.push(pushed(2))
        testing.inject("")
        update = await other.receive(timeout=10)
        return [report.delivered, report.failed, update.version, exact(2, whole)]


def test_a_copy_of_rows_that_fails_spoils_a_push_for_one_replica(
    processes: EmulatedProcesses,
) -> None:
    faults = "cudaMemcpy2DAsync@n=1:fail=999"
    delivered, failed, version, right = processes.start(_rows, faults).result(40)

    assert ("gen-0",) == delivered
    assert ["gen-1"] == list(failed)
    assert "cudaMemcpy2DAsync" in failed["gen-1"]
    assert (2, True) == (version, right)


def several(version: int) -> dict[str, torch.Tensor]:
    """Tensors that fill a segment each."""
    return {f"t{i}": torch.full((SEGMENT,), version + i).byte() for i in range(4)}


async def _come_back(job: Job, held: dict[str, torch.Tensor]) -> list[Any]:
    """Let a replica of several segments join when a function fails, and again."""
    generator = await job.enter(
        weightsync.Generator(
            job.address, held, replica="broken", segment_bytes=SEGMENT, timeout=20
        )
    )
    (refused,) = await together(lambda: generator.receive(timeout=10))
    testing.inject("")
    delivered, update = await together(
        lambda: _pushed(job), lambda: generator.receive(timeout=20)
    )
    return [str(refused), delivered, update.version]


async def _pushed(job: Job) -> Any:
    await job.trainers[0].wait_for_replicas(2, timeout=20)
    (report,) = await job.push(on("cuda", 0, several(2)))
    return report.delivered


async def _mapped(control: Control, faults: str) -> list[Any]:
    other, broken = [on("cuda", rank, several(0)) for rank in (1, 2)]
    async with open_job(1, "cuda") as job:
        generator = await job.join_one(other)
        await job.deliver(generator, on("cuda", 0, several(1)))
        testing.inject(faults)
        found = await _come_back(job, broken)
        update = await generator.receive(timeout=10)
    values = [
        all(torch.equal(each[name].cpu(), value) for name, value in several(2).items())
        for each in (other, broken)
    ]
    return [*found, update.version, values]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [name for name in nccl_functions.IN_ONE_PROCESS if name[:3] == "cuM"]
)
def test_a_function_that_fails_to_map_memory_again_concerns_no_other(
    function: str, processes: EmulatedProcesses
) -> None:
    faults = f"{function}@n=1:fail=999"
    refused, delivered, version, later, values = processes.start(
        _mapped, faults
    ).result(40)

    assert "removed from the pool" in refused
    assert function in refused
    assert {"gen-0", "broken"} == set(delivered)
    assert (2, 2) == (version, later)
    assert [True, True] == values
