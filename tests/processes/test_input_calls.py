"""Arguments and calls that make no sense, each with its error."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import weightsync
import weightsync.blocking
from tests.processes.rig import SECONDS, open_job, together

UNKNOWN = "tcp://nobody.invalid:29400"
"""Of a domain that never has any hosts (RFC 2606)."""

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def full(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(value))}


async def test_a_push_before_any_replica_has_joined_says_so_on_every_rank() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        started = anyio.current_time()
        outcomes = await job.outcomes(full(1))
        seconds = anyio.current_time() - started
        generator = await job.join_one(weights)
        (update,) = await job.deliver(generator, full(2))

    assert [weightsync.PeerError] * 2 == [type(error) for error in outcomes]
    assert all("no replica has joined" in str(error) for error in outcomes)
    assert seconds < 3
    assert (1, [2.0] * 3) == (update.version, weights["w"].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"version": 0},
        {"version": -1},
        {"version": 1.5},
        {"version": "3"},
        {"version": True},
        {"version": 2**70},
        {"on_busy": "drop"},
        {"require": "most"},
        {"timeout": 0},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
    ],
    ids=str,
)
async def test_a_bad_option_of_push_is_refused_on_every_rank(
    options: dict[str, Any],
) -> None:
    weights = full(-777)

    async with open_job(2) as job:
        generator = await job.join_one(weights)

        async def push(trainer: weightsync.Trainer) -> Any:
            try:
                return await trainer.push(full(1), **options)
            except ValueError as error:
                return error

        outcomes = await together(*[lambda t=t: push(t) for t in job.trainers])
        untouched = weights["w"].tolist()
        (update,) = await job.deliver(generator, full(2))

    (name, value) = next(iter(options.items()))
    assert [True, True] == [isinstance(error, ValueError) for error in outcomes]
    assert all(name in str(error) and str(value) in str(error) for error in outcomes)
    assert [-777.0] * 3 == untouched
    assert (1, [2.0] * 3) == (update.version, weights["w"].tolist())


@pytest.mark.parametrize("version", [3, torch.tensor(3)], ids=["int", "tensor"])
async def test_a_version_is_any_integer(version: Any) -> None:
    async with open_job() as job:
        generator = await job.join_one(full(-777))
        (update,) = await job.deliver(generator, full(1), version=version)

    assert 3 == update.version


@pytest.mark.parametrize("differing", ["partial", "on_busy", "require"])
async def test_options_that_differ_between_ranks_are_refused(differing: str) -> None:
    options = {"partial": True, "on_busy": "skip", "require": "all"}
    async with open_job(2) as job:
        generator = await job.join_one(full(-777))
        first, second = job.trainers
        outcomes = await together(
            lambda: first.push(full(1), timeout=5),
            lambda: second.push(full(1), timeout=5, **{differing: options[differing]}),
        )
        (update,) = await job.deliver(generator, full(2))

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all(differing in str(error) for error in outcomes)
    assert 1 == update.version


@pytest.mark.parametrize(
    ("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (1, 1)], ids=str
)
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    for make in (
        lambda: weightsync.Trainer(
            "tcp://127.0.0.1:1", rank=rank, world_size=world_size
        ),
        lambda: weightsync.Generator(
            "tcp://127.0.0.1:1",
            full(0),
            replica="g",
            rank=rank,
            world_size=world_size,
        ),
    ):
        with pytest.raises(weightsync.PlanError, match=f"rank {rank} "):
            make()


async def test_a_trainer_rank_of_another_world_size_is_refused() -> None:
    weights = full(-777)
    async with open_job(2) as job:
        for rank, size in ((2, 3), (1, 3)):
            stranger = weightsync.Trainer(
                job.address, rank=rank, world_size=size, timeout=5
            )
            with pytest.raises(
                weightsync.PlanError, match=f"rank {rank} of {size} does not fit"
            ):
                await stranger.__aenter__()
        twin = weightsync.Trainer(job.address, rank=1, world_size=2, timeout=1)
        with pytest.raises(weightsync.PlanError, match="a trainer rank 1 already"):
            await twin.__aenter__()
        generator = await job.join_one(weights)
        await job.deliver(generator, full(1))

    assert [1.0] * 3 == weights["w"].tolist()


async def test_a_replica_name_is_taken_once() -> None:
    weights = full(-777)
    async with open_job() as job:
        generator = await job.join_one(weights, replica="gen")
        twin = weightsync.Generator(
            job.address, full(0), replica="gen", rank=0, world_size=1, timeout=5
        )
        with pytest.raises(weightsync.PlanError, match="a replica 'gen' in the pool"):
            await twin.__aenter__()
        await job.deliver(generator, full(1))

    assert [1.0] * 3 == weights["w"].tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "swap"}, "'swap'"),
        ({"world_size": 3}, "3"),
    ],
    ids=["mode", "world size"],
)
async def test_ranks_of_a_replica_that_do_not_fit_are_refused(
    options: dict[str, Any], words: str
) -> None:
    async with open_job() as job:
        given = {"replica": "gen", "rank": 1, "world_size": 2, "timeout": 5} | options
        async with weightsync.Generator(
            job.address, full(0), replica="gen", rank=0, world_size=2, timeout=5
        ) as first:
            stranger = weightsync.Generator(job.address, full(0), **given)
            with pytest.raises(weightsync.PlanError, match=words):
                await stranger.__aenter__()
            async with weightsync.Generator(
                job.address, full(0), replica="gen", rank=1, world_size=2, timeout=5
            ) as second:
                await job.trainers[0].wait_for_replicas(1, timeout=5)
                await job.deliver([first, second], full(1))
                version = second.version

    assert 1 == version


def test_several_ranks_need_the_name_of_their_replica() -> None:
    with pytest.raises(weightsync.PlanError, match="replica="):
        weightsync.Generator("tcp://127.0.0.1:1", full(0), rank=0, world_size=2)


@pytest.mark.parametrize("mode", ["copy", "", "STAGED", None], ids=str)
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(weightsync.PlanError, match="'staged', 'swap', 'inplace'"):
        weightsync.Generator("tcp://127.0.0.1:1", full(0), mode=mode)


@pytest.mark.parametrize(
    "address",
    ["", "10.0.0.1:29400", "http://host:1", "tcp://host", "tcp://:1", "tcp://h:99999"],
)
def test_a_bad_address_is_refused(address: str) -> None:
    for make in (
        lambda: weightsync.Trainer(address, rank=0, world_size=1),
        lambda: weightsync.Generator(address, full(0)),
        lambda: weightsync.blocking.Trainer(address, rank=0, world_size=1),
    ):
        with pytest.raises(weightsync.PlanError):
            make()


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_STORE", raising=False)
    with pytest.raises(weightsync.PlanError, match="WEIGHTSYNC_STORE"):
        weightsync.Trainer()


async def test_an_address_in_use_is_refused() -> None:
    async with open_job() as job:
        second = weightsync.Trainer(job.address, rank=0, world_size=1, timeout=3)
        with pytest.raises(weightsync.PeerError, match=r"127\.0\.0\.1"):
            await second.__aenter__()


async def test_nobody_at_the_address_is_a_time_out() -> None:
    for make in (
        lambda: weightsync.Generator("tcp://127.0.0.1:1", full(0), timeout=0.5),
        lambda: weightsync.Trainer(
            "tcp://127.0.0.1:1", rank=1, world_size=2, timeout=0.5
        ),
    ):
        started = anyio.current_time()
        with pytest.raises(weightsync.TimedOutError, match=r"127\.0\.0\.1:1"):
            await make().__aenter__()

        assert 0.5 <= anyio.current_time() - started <= 3.5


async def test_a_transport_is_used_between_opening_and_closing() -> None:
    trainer = weightsync.Trainer("tcp://127.0.0.1:0", rank=0, world_size=1)
    with pytest.raises(weightsync.ClosedError, match="not opened"):
        await trainer.push(full(1))
    with pytest.raises(weightsync.ClosedError, match="not opened"):
        _ = trainer.address
    async with trainer:
        generator = weightsync.Generator(trainer.address, full(0), replica="gen")
        with pytest.raises(weightsync.ClosedError, match="not opened"):
            await generator.receive()
        with pytest.raises(weightsync.ClosedError, match="not opened"):
            generator.use().__enter__()
        with pytest.raises(weightsync.ClosedError, match="once"):
            await trainer.__aenter__()
        async with generator:
            await trainer.wait_for_replicas(1, timeout=SECONDS)
            states = (repr(trainer), repr(generator))
        with pytest.raises(weightsync.ClosedError, match="closed"):
            await generator.receive()
    for _ in range(2):
        await trainer.aclose()
        await generator.aclose()
    with pytest.raises(weightsync.ClosedError, match="closed"):
        await trainer.push(full(1))
    with pytest.raises(weightsync.ClosedError, match="closed"):
        await trainer.wait_for_replicas(1)

    assert ("trainer rank 0 of 1", "rank 0 of replica 'gen'") == tuple(
        state.strip("<>").rsplit(", ", 1)[0] for state in states
    )
    assert "closed" in repr(trainer)


def test_blocking_transports_are_used_between_opening_and_closing() -> None:
    trainer = weightsync.blocking.Trainer("tcp://127.0.0.1:0", rank=0, world_size=1)
    with pytest.raises(weightsync.ClosedError, match="not opened"):
        trainer.push(full(1))
    with trainer:
        address = trainer.address
    trainer.close()
    with pytest.raises(weightsync.ClosedError, match="closed"):
        trainer.push(full(1))

    assert address.startswith("tcp://127.0.0.1:")


async def test_a_host_that_nobody_knows_is_named_by_every_transport() -> None:
    alone = {"rank": 0, "world_size": 1, "timeout": 0.5}
    second = {"rank": 1, "world_size": 2, "timeout": 0.5}
    errors = []
    for transport in (
        weightsync.Trainer(UNKNOWN, **alone),
        weightsync.Trainer(UNKNOWN, **second),
        weightsync.Generator(UNKNOWN, full(0), replica="g", **alone),
    ):
        with pytest.raises(weightsync.WeightSyncError) as caught:
            await transport.__aenter__()
        errors.append(caught.value)

    assert all(f"store at {UNKNOWN}" in str(error) for error in errors)
    found = [type(error) for error in errors]
    late = weightsync.TimedOutError
    assert [weightsync.PeerError, late, late] == found
