"""Which implementation a name of a backend stands for, and how a user can tell."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weightsync import PlanError, UnsupportedError, testing

pytestmark = testing.requires_emulator()


def opened(name: str) -> Any:
    """Open a group of this process alone."""
    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    return dist.group.WORLD


def summed(group: Any) -> int:
    number = torch.tensor([7]).cuda()
    dist.all_reduce(number, group=group)
    return int(number.cpu().item())


def implementation(name: str, *, take: int = 0) -> list[Any]:
    from weightsync import backend

    for _ in range(take):
        backend.use_as_nccl2()
    group = opened(name)
    found = [backend.implementation_of(group), dist.get_backend(), summed(group)]
    dist.destroy_process_group()
    return found


def taken_over(name: str) -> list[Any]:
    return implementation(name, take=2)


def test_our_own_name_is_always_ours() -> None:
    found = testing.emulated(implementation, 1, args=["weightsync-nccl2"])

    assert [["weightsync", "weightsync-nccl2", 7]] == found


def test_the_name_of_torch_stays_that_of_torch() -> None:
    found = testing.emulated(implementation, 1, args=["nccl2"])

    assert [["torch", "nccl2", 7]] == found


def test_the_name_of_torch_is_ours_once_it_was_taken_over() -> None:
    assert [["weightsync", "nccl2", 7]] == testing.emulated(
        taken_over, 1, args=["nccl2"]
    )


def test_a_name_that_was_taken_over_works_beside_gloo() -> None:
    name = "cpu:gloo,cuda:nccl2"

    assert [["weightsync", name, 7]] == testing.emulated(taken_over, 1, args=[name])


def takes_over_late(name: str) -> list[Any]:
    from weightsync import backend

    group = opened(name)
    with pytest.raises(PlanError, match="a process group of that name exists"):
        backend.use_as_nccl2()
    found = [backend.implementation_of(group), summed(group)]
    dist.destroy_process_group()
    backend.use_as_nccl2()
    return [*found, backend.implementation_of(opened(name))]


@pytest.mark.parametrize("name", ["nccl2", "cpu:gloo,cuda:nccl2"])
def test_a_name_is_not_taken_over_while_a_group_has_it(name: str) -> None:
    found = testing.emulated(takes_over_late, 1, args=[name])

    assert [["torch", 7, "weightsync"]] == found


def somebody(*_: object) -> None:
    """What another package would register."""


def meets_another_package() -> list[bool]:
    from weightsync import backend

    dist.Backend.register_backend("nccl2", somebody, devices=["cuda"])
    with pytest.raises(PlanError, match="has registered that name"):
        backend.use_as_nccl2()
    return [dist.Backend._plugins["NCCL2"].creator_fn is somebody]


def test_the_name_is_left_to_another_package() -> None:
    assert [[True]] == testing.emulated(meets_another_package, 1)


def loses_its_own_name() -> list[bool]:
    from weightsync import backend

    dist.Backend.register_backend("weightsync-nccl2", somebody, devices=["cuda"])
    with pytest.raises(UnsupportedError, match="which is ours"):
        importlib.reload(backend)
    return [True]


def test_another_package_with_our_own_name_is_an_error() -> None:
    assert [[True]] == testing.emulated(loses_its_own_name, 1)


def imports_twice() -> list[Any]:
    from weightsync import backend

    backend.use_as_nccl2()
    before = dict(dist.Backend._plugins)
    importlib.reload(backend)
    return [before == dist.Backend._plugins, backend.implementation_of(opened("nccl2"))]


def test_importing_twice_changes_nothing() -> None:
    assert [[True, "weightsync"]] == testing.emulated(imports_twice, 1)


def comes_to_a_torch_without_it() -> list[Any]:
    # What a build without CUDA lacks.
    del dist.distributed_c10d.ProcessGroupNCCL2
    dist.Backend._plugins.pop("NCCL2", None)
    from weightsync import backend

    importlib.reload(backend)
    return [backend.implementation_of(opened("nccl2"))]


def test_the_name_is_ours_where_torch_has_none() -> None:
    assert [["weightsync"]] == testing.emulated(comes_to_a_torch_without_it, 1)


def tells_its_nccl() -> list[bool]:
    from weightsync import backend

    group: Any = opened(backend.NCCL)._get_backend(torch.device("cuda"))
    path = os.environ["WEIGHTSYNC_NCCL_LIBRARY"]
    return [
        group.nccl_version == "2.30.7",
        group.nccl_library == path,
        backend.find_nccl() == ("2.30.7", path),
    ]


def test_a_group_tells_which_nccl_it_uses() -> None:
    assert [[True] * 3] == testing.emulated(tells_its_nccl, 1)


def asks_for_no_nccl() -> str:
    from weightsync import backend

    with pytest.raises(UnsupportedError, match=r"nowhere\.so") as caught:
        backend.find_nccl("/nowhere.so")
    return str(caught.value)


def test_a_library_that_is_not_there_is_named() -> None:
    (said,) = testing.emulated(asks_for_no_nccl, 1)

    assert "no NCCL from 2.29 to 2.32" in said
