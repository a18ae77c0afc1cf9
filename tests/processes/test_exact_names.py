"""Which names a push must have: all that were registered, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.rig import Guarded, open_job

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def ones(*names: str) -> dict[str, Tensor]:
    return {name: torch.ones(3) for name in names}


async def refused(
    registered: dict[str, Tensor], pushed: dict[str, Any], good: dict[str, Any]
) -> list[str]:
    """Push what must be refused, twice, then what is good; return the messages."""
    before = {name: tensor.clone() for name, tensor in registered.items()}
    async with open_job(trainers=2) as job:
        generator = await job.join_one(registered)
        outcomes = await job.outcomes(pushed) + await job.outcomes(pushed)
        left = all(torch.equal(before[name], registered[name]) for name in before)
        versions = (generator.version, generator.pending)
        (update,) = await job.deliver(generator, good)

    assert [weightsync.PlanError] * 4 == [type(error) for error in outcomes]
    assert (True, (None, None)) == (left, versions)
    assert 1 == update.version
    assert all(torch.equal(good[name], registered[name]) for name in good)
    return [str(error) for error in outcomes]


@pytest.mark.parametrize(
    ("pushed", "missing", "unexpected"),
    [
        (("x", "y"), "'a', 'b'", "'x', 'y'"),
        (("a",), "'b'", "none"),
        (("a", "b", "c"), "none", "'c'"),
        (("b", "A"), "'a'", "'A'"),
    ],
)
async def test_names_that_do_not_match_are_listed_and_nothing_moves(
    pushed: tuple[str, ...], missing: str, unexpected: str
) -> None:
    places = {name: Guarded(3) for name in "ab"}
    tensors = {name: place.tensor for name, place in places.items()}
    messages = await refused(tensors, ones(*pushed), ones("a", "b"))

    expected = f"missing: {missing}; unexpected: {unexpected}"
    assert all(expected in message for message in messages)
    assert all("'gen-0'" in message for message in messages)
    assert all(place.intact for place in places.values())


async def test_an_empty_push_is_refused() -> None:
    tensors = {name: torch.full((3,), -777.0) for name in "ab"}
    (message, *_) = await refused(tensors, {}, ones("a", "b"))

    assert "no trainer pushes anything" in message


async def test_wrapper_prefixes_are_removed_anywhere_in_a_path() -> None:
    registered = {
        name: torch.full((2,), -777.0)
        for name in ("0.weight", "encoder.module.weight", "1.bias", "2.w")
    }
    pushed = {
        "_orig_mod.0._checkpoint_wrapped_module.weight": torch.full((2,), 1.0),
        "encoder._orig_mod.module.weight": torch.full((2,), 2.0),
        "_fsdp_wrapped_module._orig_mod.1.bias": torch.full((2,), 3.0),
        "2._checkpoint_wrapped_module._fsdp_wrapped_module.w": torch.full((2,), 4.0),
    }
    async with open_job() as job:
        generator = await job.join_one(registered)
        await job.deliver(generator, pushed)

    assert [[1.0] * 2, [2.0] * 2, [3.0] * 2, [4.0] * 2] == [
        tensor.tolist() for tensor in registered.values()
    ]


async def test_the_names_of_compiled_and_checkpointed_modules_match_plain_ones() -> (
    None
):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[1] = checkpoint_wrapper(model[1])
    plain = [tensor.tolist() for tensor in model.parameters()]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    compiled = torch.compile(model)
    found = []
    for pushed in (dict(compiled.named_parameters()), compiled.state_dict()):
        registered = {
            name: torch.full_like(tensor, -777.0, requires_grad=False)
            for name, tensor in zip(names, model.parameters(), strict=True)
        }
        async with open_job() as job:
            generator = await job.join_one(registered)
            await job.deliver(generator, pushed)
        found.append([tensor.tolist() for tensor in registered.values()])

    assert [plain, plain] == found


async def test_module_is_a_name_like_any_other() -> None:
    registered = {"w": torch.full((3,), -777.0)}
    (message, *_) = await refused(registered, ones("module.w"), ones("w"))

    assert "missing: 'w'; unexpected: 'module.w'" in message


async def test_two_names_that_become_one_are_refused() -> None:
    pushed = {"_orig_mod.w": torch.ones(3), "w": torch.zeros(3)}
    (message, *_) = await refused({"w": torch.zeros(3)}, pushed, ones("w"))

    assert "'_orig_mod.w' and 'w' both become 'w'" in message
    with pytest.raises(weightsync.PlanError, match="both become 'w'"):
        weightsync.Generator("tcp://127.0.0.1:1", pushed)


async def test_ignored_names_are_neither_read_nor_missed() -> None:
    weight = torch.zeros(3)
    pushed = {
        "w": torch.ones(3),
        "_orig_mod.lm_head.extra": torch.ones(5),
        "step": 3,
        "optimizer.state": {"not": "a tensor"},
    }
    async with open_job(trainers=2) as job:
        generator = await job.join_one({"w": weight})
        ignore = ["lm_head.*", "step", "optimizer.*"]
        await job.deliver(generator, pushed, ignore=ignore)

    assert [1.0, 1.0, 1.0] == weight.tolist()


async def test_one_pattern_is_not_taken_for_many_of_one_letter() -> None:
    async with open_job() as job:
        generator = await job.join_one({"w": torch.zeros(3)})
        pushed = {"w": torch.ones(3), "lm_head.w": torch.ones(3)}
        (error,) = await job.outcomes(pushed, ignore="lm_head.*")
        (update,) = await job.deliver(generator, pushed, ignore=["lm_head.*"])

    assert isinstance(error, weightsync.PlanError)
    assert "ignore" in str(error)
    assert 1 == update.version
