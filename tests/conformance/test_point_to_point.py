"""Sends and receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.calls import Call, perform, promised
from tests.conformance.exchanges import EXCHANGES
from tests.conformance.group import Answer, Refused, answer, job, rank
from tests.conformance.values import MOVED, name, octets, payload
from weightsync import testing

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD: Final = 3


def test_every_dtype_is_sent_bit_by_bit(
    backend: str, deviations: Callable[..., Any]
) -> None:
    calls = [
        Call(exchange, name(dtype), form=form)
        for exchange in EXCHANGES
        for form in ("sync", "wait")
        for dtype in MOVED
    ]

    expected = [promised(calls, WORLD, each) for each in range(WORLD)]
    found = testing.emulated(perform, WORLD, args=[backend, calls])

    assert {} == deviations(expected, found)


SIZES: Final = (5, 0, 1, 1000)


def conversation(backend: str) -> list[list[Any]]:
    """Rank 0 sends one tensor after the other, and rank 1 receives them."""
    with job(backend) as device:
        found = []
        for turn, size in enumerate(SIZES):
            tensor = payload(torch.float32, size, turn).to(device)
            if rank() == 0:
                dist.send(tensor, 1)
            else:
                tensor = torch.empty_like(tensor)
                found.append([dist.recv(tensor, 0), octets(tensor)])
        return found


def test_messages_arrive_in_their_order_and_have_a_sender(backend: str) -> None:
    found = testing.emulated(conversation, 2, args=[backend])

    expected = [
        [0, octets(payload(torch.float32, size, turn))]
        for turn, size in enumerate(SIZES)
    ]
    assert [[], expected] == found


def impossible(backend: str) -> dict[str, Answer]:
    with job(backend) as device:
        tensor = payload(torch.float32, 4, rank()).to(device)
        calls: dict[str, Callable[[], object]] = {
            "from anybody": lambda: dist.recv(tensor),
            "from anybody later": lambda: dist.irecv(tensor),
            "to a rank that is not": lambda: dist.send(tensor, 2),
            "from a rank that is not": lambda: dist.recv(tensor, 2),
            "to itself": lambda: dist.send(tensor, rank()),
            "from the host": lambda: dist.send(tensor.cpu(), 1 - rank()),
        }
        found = {case: answer(call) for case, call in calls.items()}
        ring = [
            dist.P2POp(dist.isend, tensor, 1 - rank()),
            dist.P2POp(dist.irecv, torch.empty_like(tensor), 1 - rank()),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        return {**found, "afterwards": octets(ring[1].tensor)}


def test_what_nccl_cannot_send_is_refused_and_the_group_stays_usable(
    backend: str, deviations: Callable[..., Any]
) -> None:
    found = testing.emulated(impossible, 2, args=[backend])

    refused = {
        "from anybody": Refused(("source", "src")),
        "from anybody later": Refused(("source", "src")),
        "to a rank that is not": Refused(("rank", "invalid argument")),
        "from a rank that is not": Refused(("rank", "invalid argument")),
        "to itself": Refused(("rank",)),
        "from the host": Refused(("cpu", "cuda", "dense")),
    }
    expected = [
        {**refused, "afterwards": octets(payload(torch.float32, 4, 1 - each))}
        for each in range(2)
    ]
    assert {} == deviations(expected, found)
