"""What a test, its nursery and the ranks tell each other, as msgpack.

Test and nursery have a connection that keeps messages apart: Start with descriptors
and Kill go one way, Ready and Ended the other. A Job is in a file: it may be large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import socket


class Function(msgspec.Struct, frozen=True):
    """A function of a module, and the file of that where it cannot be imported."""

    module: str
    name: str
    file: str | None = None


class Job(msgspec.Struct, frozen=True):
    """What all ranks of a call do; ``environment`` is complete but for the ranks."""

    function: Function
    args: list[Any]
    environment: dict[str, str]
    path: list[str]
    folder: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The nursery can start ranks."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start ranks. The descriptors: the job, then output and result of each rank."""

    ranks: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """End the ranks that still run: with a traceback of each, or at once."""

    at_once: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank ended; a negative code is a signal."""

    rank: int
    exit_code: int


MAX_MESSAGE: Final = 4096
MAX_DESCRIPTORS: Final = 253
"""How many the kernel passes on at once."""

_decoder: Final = msgspec.msgpack.Decoder(Ready | Start | Kill | Ended)


def encode(message: Ready | Start | Kill | Ended) -> bytes:
    """Encode one message."""
    return msgspec.msgpack.encode(message)


def receive(
    connection: socket.socket,
) -> tuple[Ready | Start | Kill | Ended | None, list[int]]:
    """Receive one message, None at the end, and descriptors that are now ours."""
    import socket

    data, descriptors, _, _ = socket.recv_fds(
        connection, MAX_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    return (_decoder.decode(data) if data else None), descriptors
