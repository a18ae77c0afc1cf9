"""A state dict is captured again at once only while its layout is the same."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightsync.errors import PlanError, UnsupportedError
from weightsync.layout import capture
from weightsync.names import rename, stack, take
from weightsync.placements import strided_shard
from weightsync.recapture import Recapture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.layout import Captured

State = dict[str, Any]


@contextmanager
def group(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group that communicates nothing."""
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with group(1, 4):
        yield init_device_mesh("cpu", (4,))


def sharded(mesh: DeviceMesh, *placements: Any) -> DTensor:
    return DTensor.from_local(torch.arange(12.0).view(6, 2), mesh, placements)


def shown(captured: Captured) -> tuple[object, ...]:
    """What of two captures has to be the same."""
    tensors = [(t.data_ptr(), t.shape, t.stride()) for t in captured.tensors]
    return captured.manifest, tensors


def test_the_same_layout_is_captured_at_once_with_the_memory_of_now(
    mesh: DeviceMesh,
) -> None:
    def state() -> State:
        return {
            "plain": torch.zeros(3),
            "sharded": sharded(mesh, ShardPlacement(0)),
            "apart": sharded(mesh, strided_shard(0, split_factor=3)),
            "empty": torch.zeros(0, 2),
            "parameter": nn.Parameter(torch.zeros(2, 2)),
        }

    recapture, before, now = Recapture(), state(), state()
    recapture(before, ())
    again = recapture.again(now, ())

    assert again is not None
    assert shown(capture(now)) == shown(again)


def test_rules_and_ignored_names_are_remembered_too() -> None:
    experts = torch.arange(24.0).view(3, 4, 2)
    rules = [stack("experts", take("experts.{e}.w"), over="e"), rename("a", "b")]
    state = {"experts": experts, "skipped": b"", "a": torch.ones(2)}
    recapture = Recapture()
    recapture(state, ["skip*"], rules)
    moved = {"experts": experts + 1, "skipped": b"", "a": torch.ones(2)}
    again = recapture.again(moved, ["skip*"], rules)

    assert again is not None
    assert shown(capture(moved, ignore=["skip*"], names=rules)) == shown(again)
    assert ("experts.0.w", "experts.1.w", "experts.2.w", "b") == again.manifest.names
    assert recapture.again(moved, ["skip*"], rules[:1]) is None
    assert recapture.again(moved, [], rules) is None


def changes(mesh: DeviceMesh) -> dict[str, tuple[State, State]]:
    w, square = torch.zeros(6, 2), torch.zeros(4, 4)
    other = DeviceMesh("cpu", [3, 1, 2, 0], _init_backend=False)
    base = sharded(mesh, ShardPlacement(0))
    two = {"a": w, "b": torch.zeros(6, 2)}
    cut = {"a": base, "b": torch.zeros(6, 2)}
    return {
        "name": ({"w": w}, {"v": w}),
        "order": (two, dict(reversed(two.items()))),
        "more": ({"a": w}, two),
        "shape": ({"w": w}, {"w": w.view(12)}),
        "strides": ({"w": square}, {"w": square.t()}),
        "dtype": ({"w": w}, {"w": w.view(torch.int32)}),
        "ties": (two, {"a": w, "b": w}),
        "lazily negated": ({"w": w}, {"w": torch._neg_view(w)}),
        "sharded": ({"w": w}, {"w": base}),
        "placement": ({"w": base}, {"w": sharded(mesh, Replicate())}),
        "dim": ({"w": base}, {"w": sharded(mesh, ShardPlacement(1))}),
        "mesh": ({"w": base}, {"w": sharded(other, ShardPlacement(0))}),
        "which is sharded": (cut, {"a": torch.zeros(6, 2), "b": base}),
        "local dtype": ({"w": base}, {"w": base.to(torch.bfloat16)}),
        "kind": ({"w": w}, {"w": b"x"}),
        "ignored": ({"w": w, "x": w.clone()}, {"w": b"x", "x": w}),
    }


def test_a_layout_that_changed_is_captured_anew(mesh: DeviceMesh) -> None:
    recapture = Recapture()
    stale = []
    for case, (before, after) in changes(mesh).items():
        recapture(before, ())
        if recapture.again(before, ()) is None or recapture.again(after, ()):
            stale.append(case)

    assert [] == stale


def test_what_was_copied_is_copied_again() -> None:
    recapture, state = Recapture(), {"w": torch.zeros(4, 3).t()}
    recapture(state, ())

    assert recapture.again(state, ()) is None


def test_a_failed_capture_is_not_taken_for_the_one_before() -> None:
    recapture, state = Recapture(), {"w": torch.zeros(4)}
    recapture(state, ())
    with pytest.raises(PlanError):
        recapture({"_orig_mod.w": torch.zeros(4), **state}, ())

    assert recapture.again(state, ()) is None


# FSDP gathers parameters, and frees them again.


def module(**options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def computed(model: nn.Module, *, backward: bool) -> None:
    total = model(torch.ones(2, 4)).sum()
    if backward:
        total.backward()


TAKES: dict[str, Callable[[nn.Module], State]] = {
    "parameters": lambda model: dict(model.named_parameters()),
    "data": lambda model: {n: p.data for n, p in model.named_parameters()},
    "state dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_is_captured_sharded_or_not_at_all(take: str, reshard: bool) -> None:
    """Whenever a dict was taken, and whenever it is pushed."""
    with group(0, 2):
        model = module(reshard_after_forward=reshard)
        expected = capture(model.state_dict())
        taken: list[State] = [TAKES[take](model)]
        outcomes: set[object] = set()
        for backward in (False, True, False):
            computed(model, backward=backward)
            taken.append(TAKES[take](model))
            for state in taken:
                try:
                    outcomes.add(shown(capture(state)) == shown(expected))
                except UnsupportedError as error:
                    outcomes.add("freed" if "freed" in str(error) else "gathered")

    gathers = not reshard and take != "state dict"
    expected = {True, "freed", "gathered"} if gathers else {True}
    assert expected == outcomes


def test_a_gathered_parameter_is_not_taken_for_what_it_was_before() -> None:
    with group(0, 2):
        model, recapture = module(), Recapture()
        plain = {"w": torch.ones(3), **model.state_dict()}
        recapture(plain, ())
        model[0].unshard()

        assert recapture.again(plain, ()) is None
        assert capture(plain).manifest == recapture(plain, ()).manifest
        with pytest.raises(UnsupportedError, match=r"'0\.weight'.*reshard\(\)"):
            capture(model.named_parameters())


def test_parameters_of_a_module_resharded_to_fewer_ranks_are_copies() -> None:
    with group(0, 4):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
        computed(model, backward=False)
        taken = dict(model.named_parameters())
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"'weight'.*reshard\(\)"):
                capture(taken)
            model.reshard()

        assert ("weight", "bias") == capture(model.state_dict()).manifest.names


def test_what_fsdp1_gathered_for_a_while_is_refused_when_it_is_gone() -> None:
    with group(0, 2):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=cpu)
        with FullyShardedDataParallel.summon_full_params(model):
            views = {name: p.detach() for name, p in model.named_parameters()}
            shapes = [spec.shape for spec in capture(views).manifest.tensors]

        assert [(4, 4), (4,), (4, 4), (4,)] == shapes
        for name, view in views.items():
            with pytest.raises(UnsupportedError, match="has no memory"):
                capture({name: view})
