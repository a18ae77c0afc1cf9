"""What comings and goings leave in the store, and what stale addresses cost."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from torch.distributed import FileStore

from tests.processes.driven import ask, call, close
from tests.processes.engines import slow_on_nccl
from tests.processes.returning import (
    call_all,
    deliver,
    generator,
    start_generators,
    start_trainers,
)
from tests.processes.test_returning import end
from weightsync.channel import Endpoint
from weightsync.store import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.processes.harness import Processes
    from tests.processes.test_returning import Way

pytestmark = [pytest.mark.usefixtures("engine"), slow_on_nccl]

NUMEL = 4096
STALE_SECONDS = 2.0
"""More than a stale address may cost on a busy machine; an attempt may take 5 s."""


class Store:
    """A store in a file, and what the tests know of it."""

    def __init__(self, path: Path) -> None:
        self.address = f"file://{path}"
        self._path = str(path)

    @property
    def _rendezvous(self) -> Rendezvous:
        return Rendezvous(FileStore(self._path, -1), "weightsync/default")

    @property
    def keys(self) -> int:
        """How many there are."""
        return FileStore(self._path, -1).num_keys()

    @property
    def term(self) -> int:
        """Leaders so far."""
        return self._rendezvous.counted("term")

    def endpoint(self, key: str) -> Endpoint | None:
        """Where somebody listens."""
        return self._rendezvous.find(key, Endpoint)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("ways", [("close", "close"), ("kill", "kill rank 0")])
def test_keys_of_a_store_stay_flat_and_are_removed_at_the_end(
    processes: Processes, store: Store, ways: tuple[Way, ...]
) -> None:
    ranks = start_generators(processes, store.address, NUMEL, ranks=2)
    trainers = start_trainers(processes, store.address, NUMEL)
    assert ["open"] * 2 == [rank.hear() for rank in ranks]
    deliver(trainers, ranks, value=1)
    keys: list[int] = []
    for value, way in enumerate(ways):
        end(trainers, ranks, way)
        trainers = start_trainers(processes, store.address, NUMEL)
        deliver(trainers, ranks, value=2 + value)
        keys.append(store.keys)
    there = [store.endpoint("leader"), store.endpoint("replica/g")]
    close(*ranks)
    close(*trainers)

    assert keys[0] == keys[1]  # of which some say that a file's key was removed
    assert None not in there
    assert [None, None] == [store.endpoint("leader"), store.endpoint("replica/g")]
    assert 3 == store.term


def _stranger(endpoint: Endpoint | None) -> socket.socket:
    """Listen where somebody did who is dead, and never say anything."""
    assert endpoint is not None
    listener = socket.create_server((endpoint.host, endpoint.port))
    listener.settimeout(20)
    return listener


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    yield found
    for stranger in found:
        stranger.close()


def test_a_stranger_at_the_address_of_a_dead_leader_delays_nobody(
    processes: Processes, store: Store, strangers: list[socket.socket]
) -> None:
    trainers = start_trainers(processes, store.address, NUMEL)
    end(trainers, [], "kill")
    strangers.append(_stranger(store.endpoint("leader")))
    ranks = start_generators(processes, store.address, NUMEL)
    strangers.append(strangers[0].accept()[0])
    trainers = start_trainers(processes, store.address, NUMEL)
    started = time.monotonic()
    assert "open" == ranks[0].hear()
    seconds = time.monotonic() - started
    delivered = deliver(trainers, ranks, value=1)
    close(*ranks, *trainers)

    assert seconds < STALE_SECONDS
    assert [(0, 1)] == delivered


def test_a_stranger_at_the_address_of_a_dead_hub_delays_nobody(
    processes: Processes, store: Store, strangers: list[socket.socket]
) -> None:
    ranks = start_generators(processes, store.address, NUMEL, ranks=2)
    trainers = start_trainers(processes, store.address, NUMEL)
    assert ["open"] * 2 == [rank.hear() for rank in ranks]
    delivered = [deliver(trainers, ranks, value=1)]
    stale = store.endpoint("replica/g")
    ranks[0].kill()
    ranks[0].join()
    told = call(ranks[1], "receive", timeout=10)
    strangers.append(_stranger(stale))
    ask(ranks[1], "receive", timeout=20)
    strangers.append(strangers[0].accept()[0])
    ranks[0] = processes.start(generator, store.address, "g", 0, 2, NUMEL)
    assert "open" == ranks[0].hear()
    started = time.monotonic()
    call_all(trainers, "wait_for_replicas", count=1)
    seconds = time.monotonic() - started
    ask(ranks[0], "receive", timeout=20)
    call_all(trainers, "push", value=2)
    again = [rank.hear().value.version for rank in ranks]
    close(*ranks, *trainers)

    assert "PeerError" == told.kind
    assert seconds < STALE_SECONDS
    assert [[(0, 1)] * 2] == delivered
    assert [2, 2] == again
