"""What a forked child lets go of, so that the death of its parent is noticed.

A fork copies descriptors: a connection of a process that dies stays open while a child
of it lives, and a port stays taken. So our sockets are replaced in every forked child.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

_held: Final[WeakKeyDictionary[object, Callable[[], int]]] = WeakKeyDictionary()
_registered: Final[list[int]] = []


def hold(owner: object, fileno: Callable[[], int]) -> None:
    """Let forked children go without the descriptor of ``owner``, while that lives.

    ``fileno`` tells it at the fork; a negative number says that it is closed.
    """
    if not _registered:
        os.register_at_fork(after_in_child=_let_go)
        _registered.append(os.getpid())
    _held[owner] = fileno


def _let_go() -> None:
    # Not closed but replaced: the objects in the child would close the number again.
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fileno in list(_held.values()):
            if (descriptor := fileno()) >= 0:
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
