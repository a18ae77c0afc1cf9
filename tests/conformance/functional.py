"""The functional collectives, which return new tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from tests.conformance.operations import Operation, Place, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conformance.operations import Buffers


def _copied(
    body: Callable[[Place, Buffers, Any], torch.Tensor | Sequence[torch.Tensor]],
    outputs: int = 1,
) -> Callable[..., Any]:
    """Return a call that copies what the body returns to the last buffers."""

    def call(
        at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
    ) -> None:
        found = body(at, it[:-outputs], dist.group.WORLD if group is None else group)
        results = [found] if isinstance(found, torch.Tensor) else found
        for buffer, result in zip(it[-outputs:], results, strict=True):
            buffer.copy_(funcol.wait_tensor(result))

    return call


def _uneven(at: Place, it: Buffers, group: Any) -> torch.Tensor:
    """Each rank sends one element more to each next one."""
    sends = [at.rank + to for to in at.ranks]
    return funcol.all_to_all_single(it[0], sends, sends, group)


FUNCTIONAL: Final[dict[str, Operation]] = {
    "functional broadcast": Operation(
        before=lambda at: [at.sent(at.rank), at.blank()],
        after=lambda at: [at.sent(at.rank), at.sent(at.root)],
        call=_copied(lambda at, it, group: funcol.broadcast(it[0], at.root, group)),
    ),
    "functional all_reduce": Operation(
        before=lambda at: [at.addend(at.rank), at.blank()],
        after=lambda at: [at.addend(at.rank), at.total()],
        call=_copied(
            lambda at, it, group: funcol.all_reduce(it[0], at.reduction, group)
        ),
    ),
    "functional all_reduce_coalesced": Operation(
        before=lambda at: [
            at.addend(at.rank),
            at.addend(at.rank),
            *at.blanks()[:1],
            at.blank(),
        ],
        after=lambda at: [*[at.addend(at.rank)] * 2, *[at.total()] * 2],
        call=_copied(
            lambda at, it, group: funcol.all_reduce_coalesced(it, at.reduction, group),
            2,
        ),
    ),
    "functional all_gather": Operation(
        before=lambda at: [at.sent(at.rank), at.blank(at.count * at.world)],
        after=lambda at: [at.sent(at.rank), torch.cat([*map(at.sent, at.ranks)])],
        call=_copied(lambda at, it, group: funcol.all_gather_tensor(it[0], 0, group)),
    ),
    "functional all_gather_coalesced": Operation(
        before=lambda at: [at.sent(at.rank), at.blank(at.count * at.world)],
        after=lambda at: [at.sent(at.rank), torch.cat([*map(at.sent, at.ranks)])],
        call=_copied(
            lambda at, it, group: funcol.all_gather_into_tensor_coalesced(it, group)
        ),
    ),
    "functional reduce_scatter": Operation(
        before=lambda at: [at.addend(at.rank, at.world), at.blank()],
        after=lambda at: [
            at.addend(at.rank, at.world),
            cut(at, at.total(at.world))[at.rank],
        ],
        call=_copied(
            lambda at, it, group: funcol.reduce_scatter_tensor(
                it[0], at.reduction, 0, group
            )
        ),
    ),
    "functional reduce_scatter_coalesced": Operation(
        before=lambda at: [at.addend(at.rank, at.world), at.blank()],
        after=lambda at: [
            at.addend(at.rank, at.world),
            cut(at, at.total(at.world))[at.rank],
        ],
        call=_copied(
            lambda at, it, group: funcol.reduce_scatter_tensor_coalesced(
                it, at.reduction, [0], group
            )
        ),
    ),
    "functional all_to_all": Operation(
        before=lambda at: [
            torch.cat([at.sent(at.rank, to, count=at.rank + to) for to in at.ranks]),
            at.blank(sum(at.rank + to for to in at.ranks)),
        ],
        after=lambda at: [
            torch.cat([at.sent(at.rank, to, count=at.rank + to) for to in at.ranks]),
            torch.cat([at.sent(of, at.rank, count=at.rank + of) for of in at.ranks]),
        ],
        call=_copied(_uneven),
    ),
}
