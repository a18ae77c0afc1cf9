"""Calls of the collectives: what is promised of each, and how ranks make them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from tests.conformance.backends import COMPLEX
from tests.conformance.coalesced import COALESCED, LISTS
from tests.conformance.exchanges import EXCHANGES
from tests.conformance.functional import FUNCTIONAL
from tests.conformance.group import Answer, Refused, error_of, job
from tests.conformance.operations import OPERATIONS, Operation, Place
from tests.conformance.values import UNMAPPED, name, octets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EVERY: Final[dict[str, Operation]] = {
    **OPERATIONS,
    **COALESCED,
    **LISTS,
    **EXCHANGES,
    **FUNCTIONAL,
}

FORMS: Final = ("sync", "wait", "future", "polled")

_FACTORED: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Call(NamedTuple):
    """One call of a collective; ranks get it as a list.

    ``form`` is how it is waited for: not at all for ``sync``, otherwise the call is
    asynchronous, and its work is waited for, or its future, or it is asked for its end.
    """

    operation: str
    dtype: str = "float32"
    reduction: str = "sum"
    count: int = 6
    form: str = "sync"

    @property
    def label(self) -> str:
        """Name the call among those of its test."""
        return " ".join(map(str, self))

    def place(self, rank: int, world: int) -> Place:
        """Return what a rank of the group does it with."""
        dtype = getattr(torch, self.dtype)
        return Place(rank, world, dtype, self.count, self.reduction)


def promised(
    calls: Iterable[Call], world: int, rank: int, backend: str = ""
) -> dict[str, bytes | Refused]:
    """Return what the calls leave in the tensors of a rank of the group.

    That is what every backend promises, and ``backend`` if one is given.
    """
    return {
        call.label: _promise(call, call.place(rank, world), backend) for call in calls
    }


def refused_last(calls: Iterable[Call], backend: str) -> list[Call]:
    """Put those to the end that raise an error, as a backend may not survive that."""
    return sorted(
        calls,
        key=lambda each: bool(_refusal(each.operation, each.place(0, 1), backend)),
    )


def _promise(call: Call, place: Place, backend: str) -> bytes | Refused:
    words = _refusal(call.operation, place, backend)
    if words:
        return Refused(words)
    return b"".join(map(octets, EVERY[call.operation].after(place)))


def _refusal(operation: str, place: Place, backend: str) -> tuple[str, ...]:
    """Words of which the error has one that such a call raises; none if it does not."""
    dtype, reduction = place.dtype, place.reduction
    if dtype in UNMAPPED:
        return ("type",)
    if dtype.is_complex:
        taken = _takes_complex(operation, reduction, backend)
        return () if taken else ("complex", "type")
    if "reduce" in operation and "fnuz" in name(dtype):
        return ("float8", "type", reduction)
    return _refused_reduction(dtype, reduction)


def _refused_reduction(dtype: torch.dtype, reduction: str) -> tuple[str, ...]:
    bitwise = reduction in {"band", "bor", "bxor"}
    if bitwise or (reduction == "avg" and dtype == torch.bool):
        return (reduction,)
    if reduction == "premul_sum" and dtype not in _FACTORED:
        return ("premulsum", "premul_sum")
    return ()


def _takes_complex(operation: str, reduction: str, backend: str) -> bool:
    """torch passes them on as twice as many real numbers, where that is the same."""
    passed = "reduce_scatter" not in operation or backend in COMPLEX
    return passed and reduction in {"sum", "avg", "premul_sum"}


def perform(backend: str, calls: Sequence[Sequence[Any]]) -> dict[str, Answer]:
    """Make the calls in the default group of a job; for ranks."""
    with job(backend) as device:
        return made([Call(*call) for call in calls], device)


def made(
    calls: Iterable[Call], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, Answer]:
    """Make the calls in a group of which this process is a rank."""
    return {call.label: make(call, device, group) for call in calls}


def make(
    call: Call, device: torch.device, group: dist.ProcessGroup | None = None
) -> Answer:
    """Make one call, and return the bytes of all its tensors after it."""
    operation = EVERY[call.operation]
    place = call.place(dist.get_rank(group), dist.get_world_size(group))
    buffers = [tensor.to(device) for tensor in operation.before(place)]

    return issue(call, place, buffers, group) or b"".join(map(octets, buffers))


def issue(
    call: Call,
    place: Place,
    buffers: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> str:
    """Make a call with these tensors, and wait for it; return the error, if any."""

    def complete() -> None:
        options = {"group": group, "async_op": call.form != "sync"}
        _await(EVERY[call.operation].call(place, buffers, **options), call.form)

    return error_of(complete)


def _await(work: Any, form: str) -> None:
    if form == "wait":
        work.wait()
    elif form == "future":
        work.get_future().wait()
    elif form == "polled":
        while not work.is_completed():
            time.sleep(0.0005)
