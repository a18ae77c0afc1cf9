"""How a peer that has connected is admitted, or told why not, and how it goes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from weightsync.errors import OtherStartError, PlanError, ProtocolError, WeightSyncError
from weightsync.messages import Ended, Fault, Leaving, Manifests
from weightsync.together import validate_together

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from weightsync.hellos import TrainerHello
    from weightsync.peer import Conversations, MessageStream, Peer

MANIFEST_SECONDS: Final = 30.0
"""How long a peer may take to send its manifests after its hello."""


class End(NamedTuple):
    """How a conversation ended; ``left`` says that the peer announced it."""

    error: WeightSyncError
    left: bool


@asynccontextmanager
async def admitting(peer: Peer, stream: MessageStream) -> AsyncGenerator[None]:
    """Tell the peer what is raised here: why it is not admitted."""
    try:
        yield
    except WeightSyncError as error:
        peer.discard()
        await stream.send(Ended(Fault.of(error)))
        raise


def check_alike(hello: TrainerHello, leader: TrainerHello) -> None:
    """Check that a trainer rank was started like rank 0.

    PlanError where it was not; OtherStartError for a later epoch than the leader's.
    """
    for option in ("epoch", "replay", "admit"):
        mine, theirs = getattr(leader, option), getattr(hello, option)
        if mine != theirs:
            later = option == "epoch" and (hello.epoch or 0) > (leader.epoch or 0)
            kind = OtherStartError if later else PlanError
            message = (
                f"trainer rank {hello.rank} was started with {option}={theirs!r}, and "
                f"rank 0 with {option}={mine!r}: all ranks need the same"
            )
            raise kind(message)


async def manifests(stream: MessageStream, count: int, handles: int = 0) -> Manifests:
    """Return the manifests, and so many handles, that follow a hello.

    ProtocolError for anything else.
    """
    message: Any = None
    with anyio.move_on_after(MANIFEST_SECONDS):
        message = await stream.receive()
    if not isinstance(message, Manifests) or len(message.together.ranks) != count:
        raise ProtocolError(f"{stream.peer} did not send {count} manifests")
    if {len(message.handles), len(message.segments)} != {handles}:
        raise ProtocolError(f"{stream.peer} did not send {handles} handles")
    validate_together(message.together)
    return message


async def converse(
    conversations: Conversations, peer: Peer, handle: Callable[[Any], None]
) -> End:
    """Hand every message over; return how it ended."""
    left = False

    def noting(message: Any) -> None:
        """Hand it over, and remember whether it was the last."""
        nonlocal left
        left = left or isinstance(message, Leaving)
        handle(message)

    error = await conversations.hold(peer, noting)
    return End(error, left)
