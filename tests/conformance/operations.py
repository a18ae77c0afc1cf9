"""Every collective that moves or reduces tensors: its buffers, its call, its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.values import FACTOR, addends, blank, payload, reduced

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what an operation is called; ranks are those in the group."""

    rank: int
    world: int
    dtype: torch.dtype
    count: int = 6
    reduction: str = "sum"

    @property
    def root(self) -> int:
        """A rank that is not 0 where there is another one."""
        return self.world // 2

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world)

    def sent(self, *seed: int, count: int | None = None) -> torch.Tensor:
        """Return what is sent by a rank, and to another one if that is given."""
        return payload(self.dtype, self.count if count is None else count, *seed)

    def blank(self, count: int | None = None) -> torch.Tensor:
        """Return an output to which nothing was written."""
        return blank(self.dtype, self.count if count is None else count)

    def blanks(self) -> list[torch.Tensor]:
        """Return one such output for each rank."""
        return [self.blank() for _ in self.ranks]

    def addend(self, rank: int, blocks: int = 1) -> torch.Tensor:
        """Return what a rank gives to a reduction."""
        count = self.count * blocks
        return addends(self.reduction, self.dtype, count, rank, self.world)

    def total(self, blocks: int = 1) -> torch.Tensor:
        """Return what the reduction of that is."""
        return reduced(
            self.reduction, [self.addend(each, blocks) for each in self.ranks]
        )

    def op(self) -> Any:
        """Return the reduction as c10d takes it."""
        if self.reduction == "premul_sum":
            return dist._make_nccl_premul_sum(FACTOR)
        return getattr(dist.ReduceOp, self.reduction.upper())


Buffers = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective.

    ``before`` are all the tensors that a rank passes, with what is in them, ``after``
    the same tensors when it is done: inputs are not to change. ``call`` takes them on
    the GPU, and the options ``group`` and ``async_op``.
    """

    before: Callable[[Place], Buffers]
    after: Callable[[Place], Buffers]
    call: Callable[..., Any]


def cut(place: Place, whole: torch.Tensor) -> Buffers:
    """Blocks of a tensor, one for each rank."""
    return list(whole.reshape(place.world, place.count).unbind())


def _total_in_own_block(place: Place) -> torch.Tensor:
    blocks = cut(place, place.addend(place.rank, place.world))
    blocks[place.rank] = cut(place, place.total(place.world))[place.rank]
    return torch.cat(blocks)


def _uneven(rank: int) -> int:
    """Return how many elements that rank has: none, or some."""
    return (3 * rank + 2) % 5


MOVES: Final[dict[str, Operation]] = {
    "broadcast": Operation(
        before=lambda at: [at.sent(at.rank)],
        after=lambda at: [at.sent(at.root)],
        call=lambda at, it, **options: dist.broadcast(
            it[0], group_src=at.root, **options
        ),
    ),
    "all_gather": Operation(
        before=lambda at: [at.sent(at.rank), *at.blanks()],
        after=lambda at: [at.sent(at.rank), *map(at.sent, at.ranks)],
        call=lambda at, it, **options: dist.all_gather(it[1:], it[0], **options),
    ),
    "all_gather_uneven": Operation(
        before=lambda at: [
            at.sent(at.rank, count=_uneven(at.rank)),
            *(at.blank(_uneven(each)) for each in at.ranks),
        ],
        after=lambda at: [
            at.sent(each, count=_uneven(each)) for each in [at.rank, *at.ranks]
        ],
        call=lambda at, it, **options: dist.all_gather(it[1:], it[0], **options),
    ),
    "all_gather_into_tensor": Operation(
        before=lambda at: [at.sent(at.rank), at.blank(at.count * at.world)],
        after=lambda at: [at.sent(at.rank), torch.cat([*map(at.sent, at.ranks)])],
        call=lambda at, it, **options: dist.all_gather_into_tensor(
            it[1], it[0], **options
        ),
    ),
    "all_gather_in_place": Operation(
        before=lambda at: [
            torch.cat(
                [
                    at.sent(at.rank) if each == at.rank else at.blank()
                    for each in at.ranks
                ]
            )
        ],
        after=lambda at: [torch.cat([*map(at.sent, at.ranks)])],
        call=lambda at, it, **options: dist.all_gather_into_tensor(
            it[0], it[0][at.rank * at.count :][: at.count], **options
        ),
    ),
    "all_to_all": Operation(
        before=lambda at: [*(at.sent(at.rank, to) for to in at.ranks), *at.blanks()],
        after=lambda at: [
            *(at.sent(at.rank, to) for to in at.ranks),
            *(at.sent(of, at.rank) for of in at.ranks),
        ],
        call=lambda at, it, **options: dist.all_to_all(
            it[at.world :], it[: at.world], **options
        ),
    ),
    "all_to_all_uneven": Operation(
        before=lambda at: [
            *(at.sent(at.rank, to, count=_uneven(at.rank + to)) for to in at.ranks),
            *(at.blank(_uneven(of + at.rank)) for of in at.ranks),
        ],
        after=lambda at: [
            *(at.sent(at.rank, to, count=_uneven(at.rank + to)) for to in at.ranks),
            *(at.sent(of, at.rank, count=_uneven(of + at.rank)) for of in at.ranks),
        ],
        call=lambda at, it, **options: dist.all_to_all(
            it[at.world :], it[: at.world], **options
        ),
    ),
    "all_to_all_single": Operation(
        before=lambda at: [
            torch.cat([at.sent(at.rank, to) for to in at.ranks]),
            at.blank(at.count * at.world),
        ],
        after=lambda at: [
            torch.cat([at.sent(at.rank, to) for to in at.ranks]),
            torch.cat([at.sent(of, at.rank) for of in at.ranks]),
        ],
        call=lambda at, it, **options: dist.all_to_all_single(it[1], it[0], **options),
    ),
    "all_to_all_single_uneven": Operation(
        before=lambda at: [
            torch.cat(
                [at.sent(at.rank, to, count=_uneven(at.rank + to)) for to in at.ranks]
            ),
            at.blank(sum(_uneven(of + at.rank) for of in at.ranks)),
        ],
        after=lambda at: [
            torch.cat(
                [at.sent(at.rank, to, count=_uneven(at.rank + to)) for to in at.ranks]
            ),
            torch.cat(
                [at.sent(of, at.rank, count=_uneven(of + at.rank)) for of in at.ranks]
            ),
        ],
        call=lambda at, it, **options: dist.all_to_all_single(
            it[1],
            it[0],
            [_uneven(of + at.rank) for of in at.ranks],
            [_uneven(at.rank + to) for to in at.ranks],
            **options,
        ),
    ),
    "gather": Operation(
        before=lambda at: [
            at.sent(at.rank),
            *(at.blanks() if at.rank == at.root else []),
        ],
        after=lambda at: [
            at.sent(at.rank),
            *(map(at.sent, at.ranks) if at.rank == at.root else []),
        ],
        call=lambda at, it, **options: dist.gather(
            it[0],
            it[1:] if at.rank == at.root else None,
            group_dst=at.root,
            **options,
        ),
    ),
    "gather_single": Operation(
        before=lambda at: [
            at.sent(at.rank),
            *([at.blank(at.count * at.world)] if at.rank == at.root else []),
        ],
        after=lambda at: [
            at.sent(at.rank),
            *([torch.cat([*map(at.sent, at.ranks)])] if at.rank == at.root else []),
        ],
        call=lambda at, it, **options: dist.gather_single(
            it[0], it[1] if at.rank == at.root else None, group_dst=at.root, **options
        ),
    ),
    "scatter": Operation(
        before=lambda at: [
            at.blank(),
            *([at.sent(at.rank, to) for to in at.ranks] if at.rank == at.root else []),
        ],
        after=lambda at: [
            at.sent(at.root, at.rank),
            *([at.sent(at.rank, to) for to in at.ranks] if at.rank == at.root else []),
        ],
        call=lambda at, it, **options: dist.scatter(
            it[0],
            it[1:] if at.rank == at.root else None,
            group_src=at.root,
            **options,
        ),
    ),
}
"""Those that only move, of any bits."""

REDUCTIONS: Final[dict[str, Operation]] = {
    "all_reduce": Operation(
        before=lambda at: [at.addend(at.rank)],
        after=lambda at: [at.total()],
        call=lambda at, it, **options: dist.all_reduce(it[0], at.op(), **options),
    ),
    "all_reduce_coalesced": Operation(
        before=lambda at: [at.addend(at.rank), at.addend(at.rank, 2)],
        after=lambda at: [at.total(), at.total(2)],
        call=lambda at, it, **options: dist.all_reduce_coalesced(
            it, at.op(), **options
        ),
    ),
    "reduce": Operation(
        before=lambda at: [at.addend(at.rank)],
        after=lambda at: [at.total() if at.rank == at.root else at.addend(at.rank)],
        call=lambda at, it, **options: dist.reduce(
            it[0], group_dst=at.root, op=at.op(), **options
        ),
    ),
    "reduce_scatter": Operation(
        before=lambda at: [*cut(at, at.addend(at.rank, at.world)), at.blank()],
        after=lambda at: [
            *cut(at, at.addend(at.rank, at.world)),
            cut(at, at.total(at.world))[at.rank],
        ],
        call=lambda at, it, **options: dist.reduce_scatter(
            it[-1], it[:-1], at.op(), **options
        ),
    ),
    "reduce_scatter_uneven": Operation(
        before=lambda at: [
            *at.addend(at.rank, at.world)[: sum(map(_uneven, at.ranks))].split(
                [*map(_uneven, at.ranks)]
            ),
            at.blank(_uneven(at.rank)),
        ],
        after=lambda at: [
            *at.addend(at.rank, at.world)[: sum(map(_uneven, at.ranks))].split(
                [*map(_uneven, at.ranks)]
            ),
            at.total(at.world)[: sum(map(_uneven, at.ranks))].split(
                [*map(_uneven, at.ranks)]
            )[at.rank],
        ],
        call=lambda at, it, **options: dist.reduce_scatter(
            it[-1], it[:-1], at.op(), **options
        ),
    ),
    "reduce_scatter_tensor": Operation(
        before=lambda at: [at.addend(at.rank, at.world), at.blank()],
        after=lambda at: [
            at.addend(at.rank, at.world),
            cut(at, at.total(at.world))[at.rank],
        ],
        call=lambda at, it, **options: dist.reduce_scatter_tensor(
            it[1], it[0], at.op(), **options
        ),
    ),
    "reduce_scatter_in_place": Operation(
        before=lambda at: [at.addend(at.rank, at.world)],
        after=lambda at: [_total_in_own_block(at)],
        call=lambda at, it, **options: dist.reduce_scatter_tensor(
            cut(at, it[0])[at.rank], it[0], at.op(), **options
        ),
    ),
}
"""Those that reduce."""

OPERATIONS: Final = {**MOVES, **REDUCTIONS}
