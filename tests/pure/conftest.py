"""What tests of the leader's decisions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tests.pure.leading import Line, MakePeer
from weightsync.peer import MessageStream, Peer, local_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def peer() -> AsyncIterator[MakePeer]:
    """Make peers of a leader, and the lines on which they are answered."""
    ends: list[MessageStream] = []
    async with anyio.create_task_group() as tasks:

        def make(name: str) -> tuple[Peer, Line]:
            mine, theirs = local_pair(name, "us")
            made, line = Peer(mine), Line(theirs)
            ends.append(theirs)
            tasks.start_soon(made.run, lambda message: None)
            tasks.start_soon(line.listen)
            return made, line

        yield make
        for end in ends:
            await end.aclose()
