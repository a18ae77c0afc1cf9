"""Garbage on every port and under every key: dropped, survived, never unpickled."""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tests.processes import driven
from tests.processes.driven import MIB, ask, call

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes

ROOT = Path(__file__).parents[2]


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _listening(pid: int) -> dict[int, str]:
    """Return the ports that a process listens on, each with its address."""
    inodes: set[str] = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = str(Path(f"/proc/{pid}/fd/{name}").readlink())
        except FileNotFoundError:
            continue
        inodes.update(re.findall(r"socket:\[(\d+)\]", target))
    found: dict[int, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found[int(port, 16)] = host
    return found


def _resident(child: Child) -> float:
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _garbage(marker: Path) -> list[bytes]:
    pickled = pickle.dumps(Exploit(marker))
    return [
        os.urandom(1024),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack(">Q", 2**62),
        struct.pack("<Q", 2**62),
        b"\xff\xff\xff\xff" + b"\xff" * 64,
        struct.pack(">I", 4096) + b"half",
        struct.pack(">I", len(pickled)) + pickled,
        pickled,
        b"",
    ]


def _start(processes: Processes, address: str) -> tuple[list[Child], list[Child]]:
    trainers = [processes.start(driven.trainer, address, i, 2, MIB) for i in range(2)]
    generators = [
        processes.start(driven.generator, address, "pair", rank, 2, MIB)
        for rank in range(2)
    ]
    for child in (*trainers, *generators):
        assert child.hear() == "open"
    for trainer in trainers:
        assert call(trainer, "wait_for_replicas", count=1).kind == "ok"
    return trainers, generators


def _push(trainers: list[Child], generators: list[Child], version: int) -> None:
    for generator in generators:
        ask(generator, "receive", timeout=5)
    for trainer in trainers:
        ask(trainer, "push", version=version, timeout=5)

    assert ["ok"] * 2 == [trainer.hear().kind for trainer in trainers]
    assert [version] * 2 == [child.hear().value.version for child in generators]
    held = [call(child, "held").value for child in generators]

    assert [(version, version)] * 2 == held


def test_garbage_on_every_port_is_dropped(
    processes: Processes, address: str, tmp_path: Path
) -> None:
    trainers, generators = _start(processes, address)
    children = [*trainers, *generators]
    _push(trainers, generators, 1)
    _push(trainers, generators, 2)
    ports = {port: host for c in children for port, host in _listening(c.pid).items()}
    before = [_resident(child) for child in children]
    marker = tmp_path / "marker"
    open_: list[socket.socket] = []
    for port in ports:
        for data in _garbage(marker):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            connection.sendall(data)
            open_.append(connection)  # and then silence

    # The store, the leader, and rank 0 of the replica, all on loopback only.
    assert 3 == len(ports)
    assert {"0100007F"} == set(ports.values())

    _push(trainers, generators, 3)
    for connection in open_:
        connection.close()
    _push(trainers, generators, 4)
    after = [_resident(child) for child in children]

    assert all(new - old < 16 for old, new in zip(before, after, strict=True))
    assert not marker.exists()
    assert driven.close(*children) < 5


def test_many_silent_connections_keep_nobody_out(
    processes: Processes, address: str
) -> None:
    trainers, generators = _start(processes, address)
    ports = list(_listening(trainers[0].pid))
    crowd = [
        socket.create_connection(("127.0.0.1", port), timeout=5)
        for port in ports
        for _ in range(50)
    ]
    late = processes.start(driven.generator, address, "late", 0, 1, MIB)

    assert late.hear() == "open"
    for trainer in trainers:
        assert call(trainer, "wait_for_replicas", count=2).kind == "ok"
    _push(trainers, [*generators], 1)

    assert 1 == call(late, "receive", timeout=5).value.version
    for connection in crowd:
        connection.close()
    assert driven.close(*trainers, *generators, late) < 5


def test_a_poisoned_store_gives_a_clear_error_and_disturbs_no_running_job(
    processes: Processes, address: str, tmp_path: Path
) -> None:
    trainers, generators = _start(processes, address)
    _push(trainers, generators, 1)
    port = int(address.rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    marker = tmp_path / "marker"
    keys = [key for key in store.list_keys() if key.startswith("weightsync/")]
    for key in keys:
        store.set(key, pickle.dumps(Exploit(marker)).decode("latin-1"))

    names = {"leader", "replica/pair", "term"}
    assert {f"weightsync/default/{name}" for name in names} == set(keys)

    _push(trainers, generators, 2)
    for replica, rank, size, key in (
        ("late", 0, 1, "default/leader"),
        ("pair", 1, 2, "default/replica/pair"),
    ):
        late = processes.start(driven.generator, address, replica, rank, size, MIB)
        with pytest.raises(Exception, match="ProtocolError") as found:
            late.hear(10)

        assert key in str(found.value)
    _push(trainers, generators, 3)

    assert not marker.exists()
    assert driven.close(*trainers, *generators) < 5


def test_our_source_unpickles_nothing() -> None:
    forbidden = re.compile(
        r"\bpickle\b|\bmarshal\b|\bshelve\b|torch\.load\(|_object(_list)?\(|\beval\("
        r"|\bexec\("
    )
    found: list[str] = []
    for path in (ROOT / "weightsync").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if forbidden.search(line) and not line.lstrip().startswith("#"):
                found.append(f"{path.name}:{number}: {line.strip()}")

    assert [] == found
