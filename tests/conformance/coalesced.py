"""Several collectives in one call, and inside of the coalescing manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.backends import LISTS_OF_INPUTS
from tests.conformance.operations import Operation, Place, cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.operations import Buffers


class Several:
    """Works to be waited for together."""

    def __init__(self, *works: Any) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait for each of them."""
        for work in self._works:
            work.wait()


def settled(work: Any, *, asynchronous: bool) -> Any:
    """Wait for the work of a call that has no synchronous form, or pass it on."""
    if asynchronous:
        return work
    work.wait()
    return None


def _chosen(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _managed(body: Callable[..., object], *, old: bool = False) -> Callable[..., Any]:
    """Return a call that runs the body for each half of the buffers, in one batch.

    With ``old`` the manager opens a batch of the backend itself, as it does for
    operations without a call of their own for several tensors.
    """

    def call(
        at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
    ) -> Any:
        device = it[0].device if old else None
        half = len(it) // 2
        with dist._coalescing_manager(group, device, async_ops=async_op) as manager:
            for part in (it[:half], it[half:]):
                body(at, part, group)
        return manager if async_op else None

    return call


def _twice(operation: Callable[[Place], Buffers]) -> Callable[[Place], Buffers]:
    """Two times the buffers, where the second ones are of another size."""

    def buffers(at: Place) -> Buffers:
        larger = Place(at.rank, at.world, at.dtype, 2 * at.count + 1, at.reduction)
        return [*operation(at), *operation(larger)]

    return buffers


def _gather_single(at: Place) -> Buffers:
    return [at.sent(at.rank), at.blank(at.count * at.world)]


def _gathered_single(at: Place) -> Buffers:
    return [at.sent(at.rank), torch.cat([*map(at.sent, at.ranks)])]


def _scatter_sum(at: Place) -> Buffers:
    return [at.addend(at.rank, at.world), at.blank()]


def _scattered_sum(at: Place) -> Buffers:
    return [at.addend(at.rank, at.world), cut(at, at.total(at.world))[at.rank]]


def _all_gather_coalesced(
    at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
) -> Any:
    work = _chosen(group).all_gather_single_coalesced(it[1::2], it[::2])
    return settled(work, asynchronous=async_op)


def _reduce_scatter_coalesced(
    at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = at.op()
    work = _chosen(group).reduce_scatter_single_coalesced(it[1::2], it[::2], options)
    return settled(work, asynchronous=async_op)


def _all_gather_lists(
    at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
) -> Any:
    half = len(it) // 2
    outputs = [it[1:half], it[half + 1 :]]
    if dist.get_backend(group) not in LISTS_OF_INPUTS:
        outputs = [list(of_rank) for of_rank in zip(*outputs, strict=True)]
    return dist.all_gather_coalesced(outputs, [it[0], it[half]], group, async_op)


_REDUCED: Final = {
    "before": _twice(lambda at: [at.addend(at.rank)]),
    "after": _twice(lambda at: [at.total()]),
}
_GATHERED: Final = {"before": _twice(_gather_single), "after": _twice(_gathered_single)}
_SCATTERED: Final = {"before": _twice(_scatter_sum), "after": _twice(_scattered_sum)}


def _all_reduce(at: Place, it: Buffers, group: Any) -> None:
    dist.all_reduce(it[0], at.op(), group)


def _all_gather(at: Place, it: Buffers, group: Any) -> None:
    dist.all_gather_single(it[1], it[0], group)


def _reduce_scatter(at: Place, it: Buffers, group: Any) -> None:
    dist.reduce_scatter_single(it[1], it[0], at.op(), group)


LISTS: Final[dict[str, Operation]] = {
    "all_gather_coalesced": Operation(
        before=_twice(lambda at: [at.sent(at.rank), *at.blanks()]),
        after=_twice(lambda at: [at.sent(at.rank), *map(at.sent, at.ranks)]),
        call=_all_gather_lists,
    ),
}

COALESCED: Final[dict[str, Operation]] = {
    "all_gather_single_coalesced": Operation(**_GATHERED, call=_all_gather_coalesced),
    "reduce_scatter_single_coalesced": Operation(
        **_SCATTERED, call=_reduce_scatter_coalesced
    ),
    "managed all_reduce": Operation(**_REDUCED, call=_managed(_all_reduce)),
    "managed all_gather": Operation(**_GATHERED, call=_managed(_all_gather)),
    "managed reduce_scatter": Operation(**_SCATTERED, call=_managed(_reduce_scatter)),
    "batched all_reduce": Operation(**_REDUCED, call=_managed(_all_reduce, old=True)),
    "batched all_gather": Operation(**_GATHERED, call=_managed(_all_gather, old=True)),
    "batched reduce_scatter": Operation(
        **_SCATTERED, call=_managed(_reduce_scatter, old=True)
    ),
    "batched broadcast": Operation(
        before=_twice(lambda at: [at.sent(at.rank)]),
        after=_twice(lambda at: [at.sent(at.root)]),
        call=_managed(
            lambda at, it, group: dist.broadcast(it[0], group=group, group_src=at.root),
            old=True,
        ),
    ),
    "batched reduce": Operation(
        before=_twice(lambda at: [at.addend(at.rank)]),
        after=_twice(
            lambda at: [at.total() if at.rank == at.root else at.addend(at.rank)]
        ),
        call=_managed(
            lambda at, it, group: dist.reduce(
                it[0], op=at.op(), group=group, group_dst=at.root
            ),
            old=True,
        ),
    ),
    "batched all_to_all": Operation(
        before=_twice(
            lambda at: [
                torch.cat([at.sent(at.rank, to) for to in at.ranks]),
                at.blank(at.count * at.world),
            ]
        ),
        after=_twice(
            lambda at: [
                torch.cat([at.sent(at.rank, to) for to in at.ranks]),
                torch.cat([at.sent(of, at.rank) for of in at.ranks]),
            ]
        ),
        call=_managed(
            lambda at, it, group: dist.all_to_all_single(it[1], it[0], group=group),
            old=True,
        ),
    ),
}
