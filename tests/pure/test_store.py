"""The store: its address, its host, and whoever comes to that."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pure.cards import CARD, Card
from weightsync.errors import (
    PeerError,
    PlanError,
    TimedOutError,
    WeightSyncError,
)
from weightsync.store import (
    FileAddress,
    Rendezvous,
    TcpAddress,
    open_store,
    parse_address,
    store_address,
)

if TYPE_CHECKING:
    from torch.distributed import Store


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
