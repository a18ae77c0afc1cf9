"""Loads the compiled core and registers its c10d backends.

``weightsync-shm`` is known to ``torch.distributed`` wherever weightsync is installed::

    dist.init_process_group("weightsync-shm", ...)
"""

from __future__ import annotations

import atexit
import importlib
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightsync.errors import UnsupportedError

if TYPE_CHECKING:
    from weightsync import _C
else:
    try:
        # By its full name: the package itself imports this module.
        _C = importlib.import_module("weightsync._C")
    except ImportError as error:
        message = (
            f"weightsync's core cannot be loaded with torch {torch.__version__}; "
            f"reinstall weightsync with this torch ({error})"
        )
        raise UnsupportedError(message) from error

SHM = "weightsync-shm"

# Groups that exist, to be ended when the process ends: a thread that comes back from
# the core while the interpreter is taken down would end the process by a signal.
_groups: weakref.WeakSet[_C.ProcessGroupShm] = weakref.WeakSet()

describe = _C.describe
first_unwritable = _C.first_unwritable
repoint = _C.repoint


def _check_torch() -> None:
    """Refuse a torch of another minor: c10d differs, and calls would go astray."""
    found = ".".join(torch.__version__.split(".")[:2])
    if found != _C.TORCH_VERSION:
        message = (
            f"weightsync was built for torch {_C.TORCH_VERSION} and cannot run with "
            f"torch {torch.__version__}; reinstall weightsync with this torch"
        )
        raise UnsupportedError(message)


def create_shm(
    store: dist.Store | None,
    *,
    rank: int = 0,
    size: int = 1,
    timeout: timedelta = timedelta(minutes=30),
    enable_reconfigure: bool = False,
) -> _C.ProcessGroupShm:
    """Create a shared-memory process group without ``init_process_group``.

    With ``enable_reconfigure`` it is formed by ``reconfigure`` and needs no store;
    otherwise this returns when all ranks have met in the store.

    Raises:
        PeerError: a rank died or cannot be reached from this PID namespace.
        TimedOutError: a rank did not come.
    """
    meeting = dist.HashStore() if store is None else store
    if not _groups:
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)  # last in, so first out: before the runtimes end
    group = _C.ProcessGroupShm(meeting, rank, size, timeout, enable_reconfigure)
    _groups.add(group)
    return group


def _end_groups() -> None:
    for group in list(_groups):
        group.abort()


def _create(options: Any, backend_options: Any) -> _C.ProcessGroupShm:
    elastic = options.enable_reconfigure or bool(
        getattr(backend_options, "enable_reconfigure", False)
    )
    return create_shm(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        enable_reconfigure=elastic,
    )


def register() -> None:
    """Register the backends with ``torch.distributed``, unless they are registered.

    torch calls it for a name that it does not know, through the package's entry points.
    """
    if SHM not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHM, _create, extended_api=True, devices=["cpu"])


_check_torch()
register()
