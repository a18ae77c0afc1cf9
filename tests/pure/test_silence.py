"""Of a replica's ranks the one that was silent for the longest is shown."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightsync.elastic import Quiet
from weightsync.peer import Peer
from weightsync.silence import Heard, Sign, Silence

LEASE = 1000.0
"""Long: what passes while a test runs counts for nothing."""


class Line:
    """A stream on which something came last some seconds ago."""

    def __init__(self, silent: float = 0.0) -> None:
        self.peer = "somebody"
        self.silent = silent

    @property
    def heard(self) -> float:
        """When that was."""
        return time.monotonic() - self.silent

    async def send(self, *_: object) -> None:
        """Take it."""

    async def receive(self) -> Any:
        """Return nothing."""

    async def send_eof(self) -> None:
        """Hear that nothing follows."""

    async def aclose(self) -> None:
        """Close."""


WELL = st.integers(0, 49)
SILENT = st.integers(51, 100)


@given(st.lists(WELL | SILENT, min_size=1, unique=True), st.data())
def test_a_hub_tells_the_rank_that_was_silent_for_the_longest_and_only_once(
    shares: list[int], data: st.DataObject
) -> None:
    lines = [Line(share * LEASE / 100) for share in shares]
    silence = Silence(
        {rank: Peer(line, lease=LEASE) for rank, line in enumerate(lines)}
    )
    told, again = silence.look(), silence.look()
    for line in lines:
        line.silent = data.draw(WELL) * LEASE / 100
    well, after = silence.look(), silence.look()

    if max(shares) < 50:
        assert [None] * 4 == [told, again, well, after]
    else:
        assert told is not None
        assert told.rank is not None
        assert max(shares) == shares[told.rank]
        assert LEASE == told.lease
        assert [None, Quiet(), None] == [again, well, after]


def test_what_a_hub_told_grows_older_and_a_silent_hub_is_older_still() -> None:
    hub = Line()
    heard = Heard(Peer(hub, lease=LEASE))
    well = heard.last(0.0)
    heard.tell(Quiet(3, 600.0, 900.0), 10.0)
    quiet = heard.last(17.0)
    hub.silent = 800.0
    frozen = heard.last(17.0)
    hub.silent = 0.0
    heard.tell(Quiet(), 20.0)
    again = heard.last(40.0)

    assert Sign(607.0, 900.0, 3) == quiet
    assert [(LEASE, 0)] * 3 == [sign[1:] for sign in (well, frozen, again)]
    assert 799.0 < frozen.silent < 900.0
