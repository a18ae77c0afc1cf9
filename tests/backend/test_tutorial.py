"""What torch's tutorial on distributed programs teaches, on ``weightsync-nccl2``.

The emulator runs no kernels, so arithmetic happens on the host.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, job, rank, world
from tests.conformance.values import octets
from weightsync import testing

if TYPE_CHECKING:
    from pathlib import Path

BACKEND: Final = "weightsync-nccl2"


def number(value: float, device: torch.device) -> torch.Tensor:
    """Return a tensor of one number on a GPU."""
    return torch.tensor([value]).to(device)


def blocking() -> list[float]:
    with job(BACKEND) as device:
        tensor = number(rank() + 1.0, device)
        if rank() == 0:
            dist.send(tensor, dst=1)
        else:
            dist.recv(tensor, src=0)
        return tensor.tolist()


def test_a_number_is_sent_and_received() -> None:
    found = testing.emulated(blocking, 2)

    assert [[1.0], [1.0]] == found


def nonblocking() -> list[float]:
    with job(BACKEND) as device:
        tensor = number(rank() + 1.0, device)
        if rank() == 0:
            request = dist.isend(tensor, dst=1)
        else:
            request = dist.irecv(tensor, src=0)
        assert request is not None
        request.wait()
        return tensor.tolist()


def test_a_number_is_sent_and_received_without_blocking() -> None:
    found = testing.emulated(nonblocking, 2)

    assert [[1.0], [1.0]] == found


def table() -> dict[str, list[float]]:
    """Each collective of the tutorial's table, with rank 0 as the root."""
    with job(BACKEND) as device:
        found = {}

        def mine() -> torch.Tensor:
            return number(rank() + 1.0, device)

        def blanks() -> list[torch.Tensor]:
            return [number(-1.0, device) for _ in range(world())]

        tensor = mine()
        dist.broadcast(tensor, src=0)
        found["broadcast"] = tensor.tolist()
        tensor = mine()
        dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
        found["reduce"] = tensor.tolist()
        for op in ("SUM", "PRODUCT", "MAX", "MIN"):
            tensor = mine()
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            found[f"all_reduce {op}"] = tensor.tolist()
        tensor = mine()
        given = [number(10.0 + to, device) for to in range(world())]
        dist.scatter(tensor, given if rank() == 0 else None, src=0)
        found["scatter"] = tensor.tolist()
        outputs = blanks()
        dist.gather(mine(), outputs if rank() == 0 else None, dst=0)
        found["gather"] = torch.cat([each.cpu() for each in outputs]).tolist()
        outputs = blanks()
        dist.all_gather(outputs, mine())
        found["all_gather"] = torch.cat([each.cpu() for each in outputs]).tolist()
        dist.barrier()
        return found


def test_each_collective_of_the_table_does_what_it_says() -> None:
    found = testing.emulated(table, 3)

    expected = [
        {
            "broadcast": [1.0],
            "reduce": [6.0] if each == 0 else [each + 1.0],
            "all_reduce SUM": [6.0],
            "all_reduce PRODUCT": [6.0],
            "all_reduce MAX": [3.0],
            "all_reduce MIN": [1.0],
            "scatter": [10.0 + each],
            "gather": [1.0, 2.0, 3.0] if each == 0 else [-1.0] * 3,
            "all_gather": [1.0, 2.0, 3.0],
        }
        for each in range(3)
    ]
    assert expected == found


def subgroups() -> list[list[float]]:
    # Without a device the groups meet through the store, with it they are split off.
    with job(BACKEND, device_id=None) as device:
        found = []
        for members in ([0, 1], [1, 2]):
            group = dist.new_group(members)
            tensor = number(10.0 ** rank(), device)
            if rank() in members:
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
            found.append(tensor.tolist())
        # Rank 0 holds the store by which the last group meets.
        dist.barrier()
        return found


def test_a_group_of_some_ranks_leaves_the_others_alone() -> None:
    found = testing.emulated(subgroups, 3)

    assert [[[11.0], [1.0]], [[11.0], [110.0]], [[100.0], [110.0]]] == found


STEPS: Final = 4
RATE: Final = 0.1


def network() -> torch.nn.Module:
    """Return the same small model in every rank."""
    torch.manual_seed(1234)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
    )


def gradients(model: torch.nn.Module, step: int, part: int) -> None:
    """Compute those of one rank's part of a batch."""
    made = torch.Generator().manual_seed(100 * step + part)
    data = torch.randn(8, 5, generator=made)
    target = torch.randint(3, (8,), generator=made)
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(data), target).backward()


def descend(model: torch.nn.Module) -> None:
    """Take a step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=RATE)


def sgd() -> bytes:
    torch.set_num_threads(1)
    with job(BACKEND) as device:
        model = network()
        for step in range(STEPS):
            gradients(model, step, rank())
            for parameter in model.parameters():
                gradient = parameter.grad
                assert gradient is not None
                total = gradient.to(device)
                dist.all_reduce(total, op=dist.ReduceOp.SUM)
                gradient.copy_(total.cpu() / world())
            descend(model)
        return b"".join(map(octets, model.parameters()))


def alone() -> bytes:
    """Return the parameters of one process that computes the parts of both ranks."""
    torch.set_num_threads(1)
    model = network()
    for step in range(STEPS):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for part in range(2):
            gradients(model, step, part)
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(parameter.grad)
        means = [total / 2 for total in sums]
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        descend(model)
    return b"".join(map(octets, model.parameters()))


def test_descent_by_averaged_gradients_is_that_of_one_process() -> None:
    found = testing.emulated(sgd, 2)
    (expected,) = testing.emulated(alone, 1)

    assert [expected] * 2 == found


def ring() -> list[float]:
    """Sum around a ring.

    The operations of a communicator run in their order, so every other rank receives
    first: the tutorial lets all of them send first, which NCCL does not promise to end.
    """
    with job(BACKEND) as device:
        left, right = (rank() - 1) % world(), (rank() + 1) % world()
        total = torch.arange(3.0) + rank()
        passed = total.to(device)
        for _ in range(world() - 1):
            received = torch.empty_like(passed)
            if rank() % 2 == 0:
                dist.send(passed, right)
                dist.recv(received, left)
            else:
                dist.recv(received, left)
                dist.send(passed, right)
            total += received.cpu()
            passed = received
        return total.tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_of_sends_sums_like_all_reduce(size: int) -> None:
    found = testing.emulated(ring, size)

    ranks = sum(range(size))
    assert [[ranks, size + ranks, 2 * size + ranks]] * size == found


def initialised(method: str, path: str) -> list[Any]:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    options: dict[str, Any] = {"rank": rank(), "world_size": world()}
    if method == "env":
        options = {"init_method": "env://"}
    elif method == "file":
        options["init_method"] = f"file://{path}"
    else:
        options["init_method"] = f"tcp://{address}"
    device = torch.device("cuda", rank())
    torch.cuda.set_device(device)
    import weightsync.backend  # noqa: F401 -- registers it

    dist.init_process_group(BACKEND, timeout=TIMEOUT, **options)
    tensor = number(rank() + 1.0, device)
    dist.all_reduce(tensor)
    found = [dist.get_rank(), dist.get_world_size(), *tensor.tolist()]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("method", ["env", "file", "tcp"])
def test_ranks_meet_by_each_method(method: str, tmp_path: Path) -> None:
    found = testing.emulated(initialised, 2, args=[method, str(tmp_path / "meeting")])

    assert [[0, 2, 3.0], [1, 2, 3.0]] == found
