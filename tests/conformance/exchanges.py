"""Operations of two ranks: sends, and what receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from tests.conformance.coalesced import Several
from tests.conformance.operations import Operation, Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.operations import Buffers


def _chain(at: Place, it: Buffers, *, group: Any = None, async_op: bool = False) -> Any:
    """Each rank receives from the one before it, and sends to the one after it."""
    send, receive = (dist.isend, dist.irecv) if async_op else (dist.send, dist.recv)
    works = []
    if at.rank > 0:
        works.append(receive(it[1], group=group, group_src=at.rank - 1))
    if at.rank < at.world - 1:
        works.append(send(it[0], group=group, group_dst=at.rank + 1))
    return Several(*works) if async_op else None


def _batched(
    choose: Callable[[Place], list[tuple[Callable[..., Any], int, int]]],
) -> Callable[..., Any]:
    """Return a call of one batch: of send or receive, which buffer, and which rank."""

    def call(
        at: Place, it: Buffers, *, group: Any = None, async_op: bool = False
    ) -> Any:
        works = Several(
            *dist.batch_isend_irecv(
                [
                    dist.P2POp(way, it[index], group=group, group_peer=peer)
                    for way, index, peer in choose(at)
                ]
            )
        )
        if async_op:
            return works
        works.wait()
        return None

    return call


def _ring(at: Place) -> list[tuple[Callable[..., Any], int, int]]:
    return [
        (dist.isend, 0, (at.rank + 1) % at.world),
        (dist.irecv, 1, (at.rank - 1) % at.world),
    ]


def _all_pairs(at: Place) -> list[tuple[Callable[..., Any], int, int]]:
    """Two messages to every rank; those between the same two keep their order."""
    every = [(index, each % at.world) for index, each in enumerate([*at.ranks] * 2)]
    return [
        *((dist.isend, index, peer) for index, peer in every),
        *((dist.irecv, len(every) + index, peer) for index, peer in every),
    ]


EXCHANGES: Final[dict[str, Operation]] = {
    "chain": Operation(
        before=lambda at: [at.sent(at.rank), at.blank()],
        after=lambda at: [
            at.sent(at.rank),
            at.sent(at.rank - 1) if at.rank > 0 else at.blank(),
        ],
        call=_chain,
    ),
    "ring": Operation(
        before=lambda at: [at.sent(at.rank), at.blank()],
        after=lambda at: [at.sent(at.rank), at.sent((at.rank - 1) % at.world)],
        call=_batched(_ring),
    ),
    "all_pairs": Operation(
        before=lambda at: [
            *(at.sent(at.rank, to, turn) for turn in range(2) for to in at.ranks),
            *at.blanks(),
            *at.blanks(),
        ],
        after=lambda at: [
            *(at.sent(at.rank, to, turn) for turn in range(2) for to in at.ranks),
            *(at.sent(of, at.rank, turn) for turn in range(2) for of in at.ranks),
        ],
        call=_batched(_all_pairs),
    ),
}
"""Of all dtypes; a world of one rank sends to itself, or does nothing."""
