"""torch's recipe for third-party backends, on ``weightsync-nccl2``."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist

from tests.conformance.endings import in_turn, meeting
from tests.conformance.group import TIMEOUT, job, rank, world
from weightsync import testing

BACKEND: Final = "weightsync-nccl2"


def registered() -> list[Any]:
    before = dist.is_backend_available(BACKEND)
    import weightsync.backend  # noqa: F401 -- registers it

    return [
        before,
        dist.is_backend_available(BACKEND),
        BACKEND in dist.Backend.backend_list,
        dist.Backend.backend_capability[BACKEND],
        dist.Backend.default_device_backend_map["cuda"],
    ]


def test_it_is_registered_for_its_devices_and_is_nobodys_default() -> None:
    (found,) = testing.emulated(registered, 1)

    assert [True, True, ["cuda"], "nccl"] == found[1:]


def summed(device: torch.device, group: Any = None) -> list[float]:
    """Return the sum of the ranks' numbers."""
    tensor = torch.tensor([rank() + 1.0]).to(device)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def twice() -> list[list[float]]:
    found, store = [], meeting()
    for turn in range(2):
        with job(BACKEND, **in_turn(store, turn)) as device:
            found.append(summed(device))
            dist.barrier()
    return found


def test_a_process_opens_and_destroys_a_group_again_and_again() -> None:
    found = testing.emulated(twice, 2)

    assert [[[3.0], [3.0]]] * 2 == found


def selected() -> list[Any]:
    import weightsync.backend  # noqa: F401 -- registers it

    device = torch.device("cuda", rank())
    dist.init_process_group(BACKEND, device_id=device, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    found = [str(group.bound_device_id), dist.get_backend(), *summed(device)]
    dist.destroy_process_group()
    return found


def test_device_id_selects_the_device() -> None:
    found = testing.emulated(selected, 2)

    assert [[f"cuda:{each}", BACKEND, 3.0] for each in range(2)] == found


def mixed() -> list[Any]:
    with job(f"cpu:gloo,cuda:{BACKEND}", device_id=None) as device:
        objects: list[Any] = [None] * world()
        dist.all_gather_object(objects, {"of": rank()})
        return [*summed(torch.device("cpu")), *summed(device), objects]


def test_it_works_beside_gloo_in_one_group() -> None:
    found = testing.emulated(mixed, 2)

    assert [[3.0, 3.0, [{"of": 0}, {"of": 1}]]] * 2 == found


def misled() -> list[str]:
    import weightsync.backend  # noqa: F401 -- registers it

    torch.cuda.set_device(rank())
    try:
        dist.init_process_group(BACKEND, pg_options=object(), timeout=TIMEOUT)
    except ValueError as error:
        return [type(error).__name__, str(error)]
    return []


def test_options_of_another_kind_are_refused() -> None:
    (found,) = testing.emulated(misled, 1)

    told = (
        "the options of a group on NCCL are a weightsync.backend.NcclOptions or "
        "torch's ProcessGroupNCCL.Options; found a object"
    )
    assert ["PlanError", told] == found


def nested() -> list[Any]:
    """Groups that do not start at rank 0, one inside of the other."""
    with job(BACKEND, device_id=None) as device:
        found: list[Any] = []
        outer = dist.new_group([3, 1])
        same = dist.new_group([3, 1])
        inner = dist.new_group([3])
        for group in (outer, same):
            if rank() in (1, 3):
                by_global = torch.tensor([float(rank())]).to(device)
                by_group = by_global.clone()
                dist.broadcast(by_global, src=3, group=group)
                dist.broadcast(by_group, group_src=1, group=group)
                place = [dist.get_rank(group), dist.get_world_size(group)]
                found += [*place, *by_global.tolist(), *by_group.tolist()]
        if rank() == 3:
            found += summed(device, inner)
        dist.barrier()
        return found


def test_groups_need_not_begin_at_rank_0() -> None:
    found = testing.emulated(nested, 4)

    first, second = [0, 2, 3.0, 3.0], [1, 2, 3.0, 3.0]
    assert [[], first * 2, [], [*second * 2, 4.0]] == found


def joined() -> list[Any]:
    """Two jobs of two ranks each, and a group of all four that no job knows."""
    from weightsync.backend import _C, NcclOptions

    number = rank()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world(), is_master=number == 0)
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    own = dist.PrefixStore(f"job {number // 2}", store)
    dist.init_process_group(
        BACKEND, store=own, rank=number % 2, world_size=2, timeout=TIMEOUT
    )
    bridge = _C.ProcessGroupNccl(
        dist.PrefixStore("bridge", store), number, world(), NcclOptions(TIMEOUT)
    )
    tensor = torch.tensor([float(number)]).to(device)
    bridge.allreduce([tensor]).wait()
    found = [*tensor.tolist(), *summed(device)]
    bridge.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    store.set(f"gone {number}", "")
    if number == 0:
        store.wait([f"gone {each}" for each in range(world())])
    return found


def test_a_group_joins_jobs_that_have_none_in_common() -> None:
    found = testing.emulated(joined, 4)

    assert [[6.0, 3.0], [6.0, 3.0], [6.0, 7.0], [6.0, 7.0]] == found
