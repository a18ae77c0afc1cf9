"""The rendezvous: who is where, who comes first, and values that are not ours."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.pure.cards import CARD, Card
from weightsync.errors import (
    PlanError,
    ProtocolError,
    TimedOutError,
)
from weightsync.store import (
    MAX_VALUE,
    FileAddress,
    Rendezvous,
    open_store,
    parse_address,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else f"file://{tmp_path}/s"
    return open_store(parse_address(address), host=True, timeout=5)


@pytest.fixture
def rendezvous(store: Store) -> Rendezvous:
    return Rendezvous(store, "test")


def test_a_message_is_found_again(rendezvous: Rendezvous) -> None:
    rendezvous.publish("card", CARD)

    assert CARD == rendezvous.find("card", Card)


def test_a_later_message_takes_the_place_of_the_earlier(rendezvous: Rendezvous) -> None:
    rendezvous.publish("card", CARD)
    rendezvous.publish("card", Card(name="gen-1", rank=0))

    assert Card(name="gen-1", rank=0) == rendezvous.find("card", Card)


def test_an_absent_key_is_none_at_once_and_stays_absent(
    store: Store, rendezvous: Rendezvous
) -> None:
    started = time.monotonic()

    assert rendezvous.find("card", Card) is None
    assert time.monotonic() - started < 1
    assert not store.check(["test/card"])


def test_a_lookup_waits_for_the_message(rendezvous: Rendezvous) -> None:
    timer = threading.Timer(0.2, rendezvous.publish, ("card", CARD))
    timer.start()

    assert CARD == rendezvous.lookup("card", Card, timeout=5)
    timer.join()


def test_a_waiting_lookup_does_not_block_other_threads(rendezvous: Rendezvous) -> None:
    def wait_in_vain() -> None:
        with pytest.raises(TimedOutError):
            rendezvous.lookup("never", Card, timeout=0.5)

    waiter = threading.Thread(target=wait_in_vain)
    waiter.start()
    time.sleep(0.1)
    started = time.monotonic()
    rendezvous.publish("card", CARD)
    elapsed = time.monotonic() - started
    waiter.join()

    assert elapsed < 0.2


def test_a_lookup_in_vain_is_an_error_in_time_that_names_the_key(
    rendezvous: Rendezvous,
) -> None:
    started = time.monotonic()
    with pytest.raises(TimedOutError, match="test/card"):
        rendezvous.lookup("card", Card, timeout=0.2)

    assert time.monotonic() - started < 1


def test_a_removed_key_is_absent_and_may_be_removed_again(
    rendezvous: Rendezvous,
) -> None:
    rendezvous.publish("card", CARD)
    rendezvous.remove("card")
    rendezvous.remove("card")

    assert rendezvous.find("card", Card) is None


def test_the_first_claim_wins(rendezvous: Rendezvous) -> None:
    other = Card(name="gen-1", rank=0)

    assert rendezvous.claim("card", CARD)
    assert not rendezvous.claim("card", other)
    assert CARD == rendezvous.find("card", Card)


def test_a_removed_claim_can_be_claimed_again(rendezvous: Rendezvous) -> None:
    rendezvous.claim("card", CARD)
    rendezvous.remove("card")

    assert rendezvous.claim("card", Card(name="gen-1", rank=0))


def test_one_of_many_concurrent_claims_wins(
    tmp_path: Path, store: Store, request: pytest.FixtureRequest
) -> None:
    won: list[int] = []

    def claim(rank: int) -> None:
        # A file store of its own for each thread, as processes have.
        own = store
        if "file" in request.node.name:
            own = open_store(FileAddress(f"{tmp_path}/s"), host=False, timeout=5)
        if Rendezvous(own, "test").claim("leader", Card(name="t", rank=rank)):
            won.append(rank)

    threads = [threading.Thread(target=claim, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    leader = Rendezvous(store, "test").find("leader", Card)
    assert leader is not None
    assert [leader.rank] == won


def test_a_replacement_needs_the_right_old_message(rendezvous: Rendezvous) -> None:
    new = Card(name="gen-1", rank=0)
    rendezvous.publish("card", CARD)

    assert not rendezvous.replace("card", old=new, new=new)
    assert rendezvous.replace("card", old=CARD, new=new)
    assert new == rendezvous.find("card", Card)


def test_nothing_is_replaced_where_nothing_is(rendezvous: Rendezvous) -> None:
    new = Card(name="gen-1", rank=0)

    assert not rendezvous.replace("card", old=CARD, new=new)
    assert rendezvous.find("card", Card) is None


def test_a_counter_starts_at_zero(rendezvous: Rendezvous) -> None:
    assert [1, 2, 5] == [
        rendezvous.count("n"),
        rendezvous.count("n"),
        rendezvous.count("n", 3),
    ]


def test_namespaces_do_not_see_each_other(store: Store) -> None:
    run = Rendezvous(store, "run")
    run.scoped("a").publish("card", CARD)

    assert run.scoped("b").find("card", Card) is None
    assert CARD == run.find("a/card", Card)


def test_a_message_over_the_limit_is_refused(rendezvous: Rendezvous) -> None:
    with pytest.raises(PlanError, match=str(MAX_VALUE)):
        rendezvous.publish("card", Card(name="x" * MAX_VALUE, rank=0))


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize(
    "poison",
    [
        b"",
        b"\xc1",
        b"\xff" * 1024,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"name": "gen-0"}),
        msgspec.msgpack.encode({"name": "gen-0", "rank": "3"}),
        msgspec.msgpack.encode({"name": "gen-0", "rank": 3, "more": 1}),
        b"x" * (MAX_VALUE + 1),
    ],
    ids=lambda poison: f"{poison[:4].hex()}-{len(poison)}",
)
def test_a_value_that_is_not_ours_is_an_error_that_names_the_key(
    store: Store, rendezvous: Rendezvous, poison: bytes
) -> None:
    store.set("test/card", poison)  # type: ignore[arg-type] # bytes work, the stub lags

    with pytest.raises(ProtocolError, match="test/card"):
        rendezvous.find("card", Card)


def test_a_pickle_in_the_store_is_never_loaded(
    store: Store, rendezvous: Rendezvous, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    store.set("test/card", pickle.dumps(Trap(marker)))  # type: ignore[arg-type] # likewise

    with pytest.raises(ProtocolError, match="test/card"):
        rendezvous.find("card", Card)
    assert not marker.exists()
