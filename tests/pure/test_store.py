"""The rendezvous: addresses, who listens where, and values that are not ours."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from weightsync.errors import (
    PeerError,
    PlanError,
    ProtocolError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.store import (
    MAX_VALUE,
    FileAddress,
    Rendezvous,
    TcpAddress,
    open_store,
    parse_address,
    store_address,
)

if TYPE_CHECKING:
    from torch.distributed import Store


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    rank: int


CARD = Card(name="gen-0", rank=3)


def listening_addresses(port: int) -> set[str]:
    """The hexadecimal addresses on which this machine listens at a port."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, local_port = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(local_port, 16) == port:
                found.add(address)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until_free(port: int) -> bool:
    for _ in range(100):
        if not listening_addresses(port):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else f"file://{tmp_path}/s"
    return open_store(parse_address(address), host=True, timeout=5)


@pytest.fixture
def rendezvous(store: Store) -> Rendezvous:
    return Rendezvous(store, "test")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tcp://10.0.0.1:29400", TcpAddress("10.0.0.1", 29400)),
        ("tcp://trainer.example:1/", TcpAddress("trainer.example", 1)),
        ("tcp://[::1]:29400", TcpAddress("::1", 29400)),
        ("file:///tmp/a%20store", FileAddress("/tmp/a store")),
        ("file://localhost/tmp/store", FileAddress("/tmp/store")),
    ],
)
def test_an_address_is_read(given: str, expected: object) -> None:
    assert expected == parse_address(given)


def test_an_address_is_written_as_it_was_given() -> None:
    for given in ("tcp://10.0.0.1:29400", "tcp://[::1]:29400", "file:///tmp/store"):
        assert given == str(parse_address(given))


@pytest.mark.parametrize(
    "given",
    [
        "10.0.0.1:29400",
        "tcp://10.0.0.1",
        "tcp://:29400",
        "tcp://10.0.0.1:99999",
        "tcp://10.0.0.1:port",
        "tcp://[::1:29400",
        "tcp://user@10.0.0.1:29400",
        "tcp://10.0.0.1:29400/path",
        "tcp://10.0.0.1:29400?rank=0",
        "file://other-host/tmp/store",
        "file:relative",
        "http://10.0.0.1:29400",
    ],
)
def test_a_wrong_address_is_an_error_that_shows_it(given: str) -> None:
    with pytest.raises(PlanError, match=re.escape(repr(given))):
        parse_address(given)


def test_the_address_defaults_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_STORE", "tcp://10.0.0.1:29400")

    assert TcpAddress("10.0.0.1", 29400) == parse_address()


def test_no_address_at_all_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WEIGHTSYNC_STORE", raising=False)

    with pytest.raises(PlanError, match="WEIGHTSYNC_STORE is not set"):
        parse_address()


def test_the_store_listens_on_the_address_given_and_on_no_other() -> None:
    address = TcpAddress("127.0.0.1", 0)
    store = open_store(address, host=True, timeout=5)
    served = store_address(store, address)

    assert isinstance(served, TcpAddress)
    assert {"0100007F"} == listening_addresses(served.port)


def test_a_client_reads_what_the_host_wrote() -> None:
    address = TcpAddress("127.0.0.1", 0)
    server = open_store(address, host=True, timeout=5)
    client = open_store(store_address(server, address), host=False, timeout=5)
    Rendezvous(server, "run").publish("card", CARD)

    assert CARD == Rendezvous(client, "run").lookup("card", Card, timeout=1)


def test_a_client_waits_for_the_host_to_come_up() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    servers: list[Store] = []
    timer = threading.Timer(
        0.3, lambda: servers.append(open_store(address, host=True, timeout=5))
    )
    timer.start()
    client = open_store(address, host=False, timeout=5)
    timer.join()
    Rendezvous(client, "run").publish("card", CARD)

    assert CARD == Rendezvous(servers[0], "run").find("card", Card)


def test_an_absent_host_is_an_error_in_time_that_names_the_address() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    started = time.monotonic()
    with pytest.raises(TimedOutError, match=re.escape(str(address))):
        open_store(address, host=False, timeout=0.3)

    assert time.monotonic() - started < 2


def test_a_host_that_never_answers_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = TcpAddress("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(TimedOutError, match="no store answered"):
            open_store(address, host=False, timeout=0.6)


def test_a_busy_port_is_an_error_that_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = TcpAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(WeightSyncError, match=re.escape(str(address))):
            open_store(address, host=True, timeout=1)


def test_a_store_that_is_dropped_frees_its_port_and_its_descriptors() -> None:
    port = free_port()
    address = TcpAddress("127.0.0.1", port)
    open_store(address, host=True, timeout=5)  # Warm: the first one opens extras.
    before = open_descriptors()
    for _ in range(50):
        assert wait_until_free(port)
        store = open_store(address, host=True, timeout=5)
        Rendezvous(store, "run").publish("card", CARD)
        del store

    assert wait_until_free(port)
    assert abs(open_descriptors() - before) <= 2


def test_a_store_file_is_private_to_the_user(tmp_path: Path) -> None:
    path = tmp_path / "store"
    open_store(FileAddress(str(path)), host=True, timeout=5)

    assert 0o600 == path.stat().st_mode & 0o777


def test_a_store_file_in_no_folder_is_an_error_that_names_it() -> None:
    with pytest.raises(PeerError, match="file:///no/such/folder/store"):
        open_store(FileAddress("/no/such/folder/store"), host=True, timeout=1)


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


@pytest.mark.parametrize(
    "garbage",
    [os.urandom(1024), b"GET / HTTP/1.1\r\n\r\n", (1 << 62).to_bytes(8, "little")],
    ids=["random", "http", "length"],
)
def test_garbage_on_the_port_of_the_store_disturbs_nobody(garbage: bytes) -> None:
    address = TcpAddress("127.0.0.1", 0)
    store = open_store(address, host=True, timeout=5)
    served = store_address(store, address)
    assert isinstance(served, TcpAddress)
    with socket.create_connection((served.host, served.port)) as intruder:
        intruder.sendall(garbage)
        Rendezvous(store, "run").publish("card", CARD)

        assert CARD == Rendezvous(store, "run").find("card", Card)


SERVER = """
import sys
from weightsync.store import open_store, parse_address
store = open_store(parse_address(sys.argv[1]), host=True, timeout=5)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_store_whose_host_was_killed_is_an_error_that_names_the_key() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        client = Rendezvous(open_store(address, host=False, timeout=20), "run")
        server.kill()
        server.wait()

        with pytest.raises(PeerError, match="run/card"):
            client.lookup("card", Card, timeout=5)
