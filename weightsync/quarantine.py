"""Links that NCCL does not end: they are set apart, everything else goes on.

A put through a network to a rank that died may never complete. Then its stream stays
busy and an abort does not return, so it is made aside, with a limit. What the link uses
is left to itself: its communicator, a stream, and the memory that it has registered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from weightsync.elastic import LeftBehind
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from weightsync.link import TrainerLink
    from weightsync.peer import Peer

_logger = logging.getLogger(__name__)

LEFT_BEHIND = (
    "NCCL did not end the link: its communicator, stream and memory are set apart "
    "until this process ends"
)


def end(group: Any, who: str) -> bool:
    """Abort a process group; False, and a warning, where it is set apart. Blocks."""
    group.abort()
    if not getattr(group, "quarantined", False):
        return True
    _logger.warning("%s: %s", who, LEFT_BEHIND)
    return False


async def end_link(link: TrainerLink, leader: Peer) -> None:
    """End a link whose replica is out of the pool; tell where it is set apart."""
    await in_thread(link.abort)
    if link.set_apart and link.replica:
        leader.post(LeftBehind(link.replica, LEFT_BEHIND))
