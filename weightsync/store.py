"""Rendezvous: addresses, the store behind one, and typed values under its keys."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
import torch.distributed

from weightsync.errors import PeerError, PlanError, ProtocolError, TimedOutError
from weightsync.forked import hold

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch.distributed import Store

__all__ = [
    "STORE_VARIABLE",
    "FileAddress",
    "Rendezvous",
    "TcpAddress",
    "open_store",
    "parse_address",
    "store_address",
]

STORE_VARIABLE = "WEIGHTSYNC_STORE"

# The store is for addresses and records; anything larger belongs on a channel.
MAX_VALUE = 64 << 10

# Waiting polls, because a blocking wait would hold the store client's only lock.
FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
LONGEST_COUNT = 20  # digits of a counter
LONGEST_ATTEMPT = 2.0
"""For one attempt to connect: who gives up waits for it to end."""

# What an absent key reads as. 0xc1 is never the first byte of a msgpack document.
_ABSENT = b"\xc1weightsync: absent"

_ENCODER = msgspec.msgpack.Encoder()
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A store served by one process at ``host:port``."""

    host: str
    port: int

    def __str__(self) -> str:
        """Write the address as it is given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FileAddress:
    """A store in a file that every process can open, of one host as a rule."""

    path: str

    def __str__(self) -> str:
        """Write the address as it is given."""
        return f"file://{self.path}"


def parse_address(address: str | None = None) -> TcpAddress | FileAddress:
    """Read ``tcp://host:port`` or ``file:///path``; ``WEIGHTSYNC_STORE`` by default.

    Raises PlanError for anything else.
    """
    given = os.environ.get(STORE_VARIABLE) if address is None else address
    if not given:
        raise PlanError(f"no store address was given and {STORE_VARIABLE} is not set")
    try:
        parts = urlsplit(given)
        found = _tcp(parts.hostname, parts.port) if parts.scheme == "tcp" else None
    except ValueError as error:
        raise PlanError(f"the store address {given!r} is not valid: {error}") from error
    extra = parts.query or parts.fragment or parts.username is not None
    if found is not None and parts.path in {"", "/"} and not extra:
        return found
    local = parts.scheme == "file" and parts.netloc in {"", "localhost"}
    if local and parts.path.startswith("/") and not extra:
        return FileAddress(unquote(parts.path))
    raise PlanError(
        f"a store address is tcp://host:port or file:///path; found {given!r}"
    )


def _tcp(host: str | None, port: int | None) -> TcpAddress | None:
    return None if not host or port is None else TcpAddress(host, port)


def open_store(
    address: TcpAddress | FileAddress,
    *,
    host: bool,
    timeout: float,
    given_up: threading.Event | None = None,
) -> Store:
    """Open the store at an address; ``host`` serves it from this process.

    Blocks until the store is there. The store listens on exactly the address given
    (torch's own would listen on all interfaces); port 0 picks a port, see
    ``store_address``. A file is created private to the user, and left behind.
    ``given_up`` ends the wait from another thread, as the timeout would.

    Raises PeerError when the address cannot be served or reached, TimedOutError when
    no store answered in time.
    """
    if isinstance(address, FileAddress):
        return _open_file(address, timeout)
    if host:
        return _host(address, timeout)
    return _join(address, timeout, given_up or threading.Event())


def store_address(
    store: Store, address: TcpAddress | FileAddress
) -> TcpAddress | FileAddress:
    """Return the address with the port that a store opened on port 0 has picked."""
    if isinstance(address, TcpAddress) and isinstance(
        store, torch.distributed.TCPStore
    ):
        return TcpAddress(address.host, store.port)
    return address


def _open_file(address: FileAddress, timeout: float) -> Store:
    try:
        # The file will hold the tokens of the control channels: torch would create it
        # readable for everybody.
        os.close(os.open(address.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        store = torch.distributed.FileStore(address.path, -1)
    except (OSError, RuntimeError) as error:
        raise PeerError(f"cannot open the store {address}: {error}") from error
    store.set_timeout(timedelta(seconds=timeout))
    return store


def serve_store(host: str, timeout: float) -> torch.distributed.TCPStore:
    """Serve a store at a free port of this interface only; PeerError if that fails."""
    return _host(TcpAddress(host, 0), timeout)


def _host(address: TcpAddress, timeout: float) -> torch.distributed.TCPStore:
    try:
        listener = _listen(address)
    except OSError as error:
        raise PeerError(f"cannot serve the store at {address}: {error}") from error
    with listener:
        host, port = listener.getsockname()[:2]
        # The store owns its descriptor from here on, and closes it when it goes.
        descriptor = os.dup(listener.fileno())
    try:
        store = torch.distributed.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        raise PeerError(f"cannot serve the store at {address}: {error}") from error
    hold(store, lambda: descriptor)
    return store


def _listen(address: TcpAddress) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _join(address: TcpAddress, timeout: float, given_up: threading.Event) -> Store:
    deadline = time.monotonic() + timeout
    _await_server(address, deadline, timeout, given_up)
    # torch waits for ever for a server that accepts and says nothing; hence a thread
    # that can be left behind. It ends when that server closes the connection.
    result: list[Store | RuntimeError] = []

    def connect() -> None:
        _connect(address, timeout, result)
        given_up.set()  # wakes us; nobody else waits for it

    threading.Thread(target=connect, daemon=True).start()
    given_up.wait(max(deadline - time.monotonic(), 0.5))
    if not result:
        raise TimedOutError(
            f"something listens at {address} but no store answered within {timeout} s"
        )
    if isinstance(result[0], RuntimeError):
        raise PeerError(f"no store at {address}: {result[0]}") from result[0]
    return result[0]


def _connect(
    address: TcpAddress, timeout: float, result: list[Store | RuntimeError]
) -> None:
    try:
        store = torch.distributed.TCPStore(
            address.host,
            address.port,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        result.append(error)
    else:
        result.append(store)


def _await_server(
    address: TcpAddress, deadline: float, timeout: float, given_up: threading.Event
) -> None:
    # A plain socket, because torch logs and backs off for seconds on each refusal.
    reason: OSError | None = None
    for remaining in _polls(deadline, given_up):
        seconds = min(max(remaining, 0.001), LONGEST_ATTEMPT)
        try:
            with socket.create_connection((address.host, address.port), seconds):
                return
        except OSError as error:
            reason = error
    raise TimedOutError(
        f"no store at {address} within {timeout} s: {reason}"
    ) from reason


def _polls(deadline: float, given_up: threading.Event | None = None) -> Iterator[float]:
    """Yield the seconds left, once at least, with growing pauses in between."""
    ended = given_up or threading.Event()
    pause = FIRST_PAUSE
    remaining = deadline - time.monotonic()
    while True:
        yield remaining
        remaining = deadline - time.monotonic()
        if remaining <= 0 or ended.wait(min(pause, remaining)):
            return
        pause = min(pause * 1.5, LONGEST_PAUSE)


class Rendezvous:
    """Typed values under the keys of one namespace of a store.

    Values are msgpack and decoded strictly; nothing is pickled. Every call blocks for
    a round trip (``lookup`` until its timeout), so call it in a thread. Any number of
    threads may. PeerError says that the store is gone, ProtocolError that a value is
    not one of ours.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        # The stubs say str for values; the bindings take and return bytes.
        self._store: Any = store
        self._namespace = namespace

    def __repr__(self) -> str:
        """Show the namespace."""
        return f"<Rendezvous {self._namespace!r}>"

    def scoped(self, name: str) -> Rendezvous:
        """Return the rendezvous of a namespace within this one."""
        return Rendezvous(self._store, self._key(name))

    def publish(self, key: str, message: object) -> None:
        """Store a message under a key, in place of what was there.

        Raises PlanError for a message over ``MAX_VALUE``.
        """
        value = self._encode(key, message)
        with self._translated(key):
            self._store.set(self._key(key), value)

    def claim(self, key: str, message: object) -> bool:
        """Store a message under a key that has none; False when another was first.

        Exactly one of any number of concurrent claims succeeds. A claim that repeats
        the message of the winner succeeds too, so put the claimant into the message.
        """
        value = self._encode(key, message)
        with self._translated(key):
            return self._swap(key, b"", value) == value

    def replace(self, key: str, *, old: object, new: object) -> bool:
        """Store ``new`` in place of exactly ``old``; False when something else is."""
        value = self._encode(key, new)
        with self._translated(key):
            return self._swap(key, self._encode(key, old), value) == value

    def find(self, key: str, message_type: type[MessageT]) -> MessageT | None:
        """Return the message under a key at once, or None where there is none."""
        with self._translated(key):
            # Read by a swap that never happens: ``get`` blocks where the key is
            # absent, even if it was there a moment ago.
            value = self._swap(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else self._decode(key, value, message_type)

    def lookup(
        self, key: str, message_type: type[MessageT], *, timeout: float
    ) -> MessageT:
        """Return the message under a key, and wait for it until the timeout.

        Raises TimedOutError.
        """
        for _ in _polls(time.monotonic() + timeout):
            message = self.find(key, message_type)
            if message is not None:
                return message
        raise TimedOutError(f"no {self._key(key)!r} in the store within {timeout} s")

    def remove(self, key: str) -> None:
        """Remove a key; a key that is not there is fine."""
        with self._translated(key):
            self._store.delete_key(self._key(key))

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the counter under a key, which starts at 0, and return its value."""
        with self._translated(key):
            value: int = self._store.add(self._key(key), amount)
        return value

    def counted(self, key: str) -> int:
        """Return the value of a counter, without writing; 0 where it is not there."""
        with self._translated(key):
            value = self._swap(key, _ABSENT, _ABSENT)
        if value == _ABSENT:
            return 0
        if not value.isdigit() or len(value) > LONGEST_COUNT:
            raise ProtocolError(f"{self._key(key)!r} should hold a counter")
        return int(value)

    def retract(self, key: str, message: object) -> None:
        """Remove a key that holds this message; one that holds another stays."""
        value = self._encode(key, message)
        with self._translated(key):
            if self._swap(key, _ABSENT, _ABSENT) == value:
                self._store.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    def _swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found: bytes = self._store.compare_set(self._key(key), expected, desired)
        return found

    def _encode(self, key: str, message: object) -> bytes:
        value = _ENCODER.encode(message)
        if len(value) > MAX_VALUE:
            raise PlanError(
                f"{self._key(key)!r} would hold {len(value)} bytes; "
                f"the store takes {MAX_VALUE}"
            )
        return value

    def _decode(self, key: str, value: bytes, message_type: type[MessageT]) -> MessageT:
        wanted = f"{self._key(key)!r} should hold a {message_type.__name__}"
        if len(value) > MAX_VALUE:
            raise ProtocolError(f"{wanted}; found {len(value)} bytes")
        try:
            return msgspec.msgpack.decode(value, type=message_type)
        except _UNDECODABLE as error:
            raise ProtocolError(f"{wanted}; found something else: {error}") from error

    @contextmanager
    def _translated(self, key: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"the store failed at {self._key(key)!r}: {error}"
            ) from error
