"""Who a transport is, and where it meets the others: plain values."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.store import TcpAddress
from weightsync.vigil import DEFAULT_LEASE

if TYPE_CHECKING:
    from weightsync.store import FileAddress


@dataclass(frozen=True, slots=True)
class Place:
    """Who a transport is and where it meets the others."""

    address: TcpAddress | FileAddress
    job: str
    rank: int
    world_size: int
    timeout: float
    lease: float = DEFAULT_LEASE
    epoch: int | None = None

    @property
    def host(self) -> str:
        """The interface to listen on: this host's end of the way to the store.

        The store's own address where it is served here, and loopback for a file.
        """
        if not isinstance(self.address, TcpAddress):
            return "127.0.0.1"
        family, _, _, _, where = socket.getaddrinfo(
            self.address.host, self.address.port or 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: it only chooses a route
            host: str = probe.getsockname()[0]
            return host
