"""Groups, in particular those that ``reconfigure`` forms, and their use."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, rank
from tests.conformance.windows import board, numbers, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# What torch writes down when a group is aborted or out of time takes seconds, and waits
# for ranks that do not answer either.
_NO_REPORTS: Final = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
}


def quiet() -> None:
    """Keep torch from writing down what it knows of a group that ends."""
    os.environ.update(_NO_REPORTS)


def begin(backend: str, **options: Any) -> torch.device:
    """Open a default group that is yet to be formed, as ``group.job`` opens one."""
    quiet()
    device = torch.device("cuda", rank())
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, **{"timeout": TIMEOUT, "enable_reconfigure": True, **options}
    )
    return device


@contextmanager
def forming(backend: str, **options: Any) -> Iterator[torch.device]:
    """Open a group that is yet to be formed, and abort it at the end.

    All processes leave together: the first one holds the store of all.
    """
    yield begin(backend, **options)
    torch.cuda.synchronize()
    dist.distributed_c10d._abort_process_group()


def leave_together(processes: int, store: dist.Store | None = None) -> None:
    """Wait until so many processes are here; the first one is the last to go on.

    ``store`` is one that ``board`` returned before the group was lost.
    """
    store = store or board()
    for step in ("here", "leaving"):
        if store.add(step, 1) == processes:
            store.set(f"all {step}", "")
        if step == "here" or rank() == 0:
            store.wait([f"all {step}"])


def handles_of(generation: int, members: Sequence[int]) -> list[str]:
    """Publish the own handle, and return those of the processes in this order."""
    store = board()
    store.set(f"{generation}/{rank()}", dist._get_reconfigure_handle())
    return [store.get(f"{generation}/{each}").decode() for each in members]


def form(generation: int, members: Sequence[int]) -> bool:
    """Form the group anew of these processes; return whether this is one of them."""
    handles = handles_of(generation, members if rank() in members else ())
    if rank() in members:
        dist._reconfigure(generation + 1, handles).wait()
    return rank() in members


def exchanged(device: torch.device, group: Any = None) -> list[Any]:
    """Use a group, by default that of all, and say what came of it.

    That is the own rank, the processes by rank, the sum of their numbers, and the
    number that was received from the rank before.
    """
    place, size = dist.get_rank(group), dist.get_world_size(group)
    mine = numbers(rank(), 1)
    everybody = torch.empty(size, dtype=torch.int32, device=device)
    dist.all_gather_into_tensor(everybody, mine.to(device), group)
    total = mine.to(device)
    dist.all_reduce(total, group=group)
    received = mine.to(device)
    if size > 1:
        _pass_on(mine.to(device), received, group)
    return [place, everybody.tolist(), *total.tolist(), *received.tolist()]


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: Any) -> None:
    place, size = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (place + 1) % size, (place - 1) % size
    sending = dist.P2POp(dist.isend, sent, group=group, group_peer=following)
    receiving = dist.P2POp(dist.irecv, received, group=group, group_peer=previous)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def put_on(device: torch.device) -> list[int]:
    """Put the own number into a window of the next rank; return what came."""
    place, size = dist.get_rank(), dist.get_world_size()
    memory, tensor, window = opened(device, numbers(-1, 1))
    source = memory.holding(numbers(rank(), 1))
    window.put(source, (place + 1) % size, 0, False).wait()
    window.wait_signal((place - 1) % size, False).wait()
    return tensor.tolist()


def expected(members: Sequence[int], process: int) -> list[Any] | None:
    """Return what ``exchanged`` says in a process, None if that is no member."""
    if process not in members:
        return None
    place = members.index(process)
    return [place, list(members), sum(members), members[place - 1]]
