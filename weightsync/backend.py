"""Loads the compiled core and registers its c10d backends.

``weightsync-shm`` and ``weightsync-nccl2`` are known to ``torch.distributed`` wherever
weightsync is installed::

    dist.init_process_group("weightsync-nccl2", device_id=device)
"""

from __future__ import annotations

import atexit
import importlib
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightsync.errors import PlanError, UnsupportedError

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
NCCL = "weightsync-nccl2"

# Groups that exist, to be ended when the process ends: a thread that comes back from
# the core while the interpreter is taken down would end the process by a signal.
_groups: weakref.WeakSet[_C.ProcessGroupShm | _C.ProcessGroupNccl] = weakref.WeakSet()

NcclOptions = _C.NcclOptions

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
    group = _C.ProcessGroupShm(meeting, rank, size, timeout, enable_reconfigure)
    _end_with_process(group)
    return group


def _end_with_process(group: _C.ProcessGroupShm | _C.ProcessGroupNccl) -> None:
    if not _groups:
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)  # last in, so first out: before the runtimes end
    _groups.add(group)


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


def _create_nccl(options: Any, backend_options: Any) -> _C.ProcessGroupNccl:
    if backend_options is None:
        backend_options = NcclOptions()
    if not isinstance(backend_options, NcclOptions):
        message = (
            f"the options of {NCCL} are a weightsync.backend.NcclOptions; "
            f"found {type(backend_options).__name__}"
        )
        raise PlanError(message)
    if options.enable_reconfigure or backend_options.enable_reconfigure:
        message = f"{NCCL} cannot be formed by reconfigure yet"
        raise UnsupportedError(message)
    backend_options._timeout = options.timeout
    group = _C.ProcessGroupNccl(
        options.store, options.group_rank, options.group_size, backend_options
    )
    _end_with_process(group)
    return group


def register() -> None:
    """Register the backends with ``torch.distributed``, unless they are registered.

    torch calls it for a name that it does not know, through the package's entry points.
    """
    for name, create, device in ((SHM, _create, "cpu"), (NCCL, _create_nccl, "cuda")):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(
                name, create, extended_api=True, devices=[device]
            )


_check_torch()
register()
