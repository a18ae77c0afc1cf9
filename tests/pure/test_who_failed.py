"""A trainer rank is gone from a link: the leader says why, where it can."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from tests.pure.leading import Line
from weightsync.epoch import Mode
from weightsync.errors import PeerError, ProtocolError, WeightSyncError
from weightsync.generator import WORD_SECONDS, GeneratorRank, Settled
from weightsync.messages import Ended, Expect, Fault, FormLink, LinkFailed
from weightsync.peer import Peer, local_pair
from weightsync.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

GONE = PeerError("waiting for signals: trainer rank 1 (process 7) left the group")
LEADER = PeerError("replica 'g' lost the trainers of term 1: the leader is silent")
LEASE = 0.5
FORM = FormLink(link=3, uuid=1, handles=(), trainers=2, seconds=5.0, mode="staged")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class _Link:
    """A link that fails when it is joined, or when its signals are waited for."""

    def __init__(self, at: str, error: WeightSyncError) -> None:
        self._at = at
        self._error = error
        self.engine = SimpleNamespace(announced=False, call=self._call)
        nothing = lambda: None  # noqa: E731 -- two calls that do nothing.
        self.window = SimpleNamespace(expose=nothing, conceal=nothing)
        self.naming = nullcontext

    def join(self, *_: object) -> None:
        if self._at == "forming":
            raise self._error

    def use(self, layout: bytes) -> None:
        """Every layout is known."""

    def await_signals(self, *_: object) -> None:
        raise self._error

    async def _call(self, function: Callable[..., object], *args: object) -> object:
        return function(*args)


async def _fails(
    at: str, error: WeightSyncError, *messages: object
) -> tuple[WeightSyncError | None, list[Any], float]:
    """Let a link fail, and the hub say something after a moment.

    Returns the error of the rank, what it said to its hub, and after how long.
    """

    async def settle() -> Settled:
        return Settled(cast("Any", SimpleNamespace()), cast("Any", None))

    reading = Reading(Mode.STAGED, lambda: None)
    link = cast("Any", _Link(at, error))
    rank = GeneratorRank(0, reading, link, settle, LEASE)
    mine, theirs = local_pair("this rank", "its hub")
    line, peer = Line(theirs), Peer(mine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.run, lambda _: None)
        tasks.start_soon(line.listen)
        rank.speak(peer, cast("Any", tasks))
        rank.handle(FORM)
        if at == "waiting":
            await rank.formed.wait()
            rank.handle(Expect(1, 1, bytes(16)))
        await anyio.sleep(LEASE / 5)
        for message in messages:
            rank.handle(cast("Any", message))
        said: list[Any] = []
        started = anyio.current_time()
        with anyio.fail_after(LEASE + WORD_SECONDS + 5):
            while not any(isinstance(one, LinkFailed) for one in said):
                said += await line.all()
                await anyio.sleep(0.01)
        seconds = anyio.current_time() - started
        await theirs.aclose()
    return rank.error, said, seconds


@pytest.mark.parametrize("at", ["forming", "waiting"])
async def test_the_word_of_the_leader_comes_before_what_the_link_says(at: str) -> None:
    error, _, seconds = await _fails(at, GONE, Ended(Fault.of(LEADER)))

    assert str(LEADER) == str(error)
    assert seconds < LEASE


@pytest.mark.parametrize("at", ["forming", "waiting"])
async def test_a_leader_that_says_nothing_is_not_waited_for_longer_than_its_lease(
    at: str,
) -> None:
    error, said, seconds = await _fails(at, GONE)
    (told,) = [one for one in said if isinstance(one, LinkFailed)]

    assert (Fault.of(GONE), 3 if at == "forming" else 0) == (told.fault, told.link)
    assert (None if at == "forming" else GONE) == error
    assert 0.8 * LEASE + WORD_SECONDS - 0.1 < seconds


@pytest.mark.parametrize("at", ["forming", "waiting"])
async def test_what_is_wrong_here_is_said_at_once(at: str) -> None:
    wrong = ProtocolError("a header that is not ours")
    _, said, seconds = await _fails(at, wrong)

    assert [Fault.of(wrong)] == [o.fault for o in said if isinstance(o, LinkFailed)]
    assert seconds < LEASE
