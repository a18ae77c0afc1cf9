"""Loads the compiled core and registers its c10d backends.

``weightsync-shm`` and ``weightsync-nccl2`` are known to ``torch.distributed`` wherever
weightsync is installed, and ``nccl2`` is ours too where torch has none::

    dist.init_process_group("weightsync-nccl2", device_id=device)
"""

from __future__ import annotations

import atexit
import importlib
import re
import weakref
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightsync.errors import PlanError, UnsupportedError
from weightsync.nccl_options import choose_timeout, options_from

if TYPE_CHECKING:
    from collections.abc import Callable

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
NCCL2 = "nccl2"
"""torch's name for its own; ours by ``use_as_nccl2``, or where torch has none."""

# Groups that exist, to be ended when the process ends: a thread that comes back from
# the core while the interpreter is taken down would end the process by a signal.
_groups: weakref.WeakSet[_C.ProcessGroupShm | _C.ProcessGroupNccl] = weakref.WeakSet()

NcclConfig = _C.NcclConfig
NcclOptions = _C.NcclOptions

describe = _C.describe
first_unwritable = _C.first_unwritable
repoint = _C.repoint
find_nccl = _C.find_nccl
map_again = _C.map_again
nccl_allocation = _C.nccl_allocation
nccl_allocator = _C.nccl_allocator


def _check_torch() -> None:
    """Refuse a torch of another minor: c10d differs, and calls would go astray."""
    found = ".".join(torch.__version__.split(".")[:2])
    if found != _C.TORCH_VERSION:
        message = (
            f"weightsync was built for torch {_C.TORCH_VERSION} and cannot run with "
            f"torch {torch.__version__}; reinstall weightsync with this torch"
        )
        raise UnsupportedError(message)


def core_version() -> str:
    """Return the minor version of torch that the core was built for."""
    return _C.TORCH_VERSION


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


def create_nccl(
    store: dist.Store,
    *,
    rank: int = 0,
    size: int = 1,
    options: _C.NcclOptions | None = None,
    timeout: timedelta = timedelta(minutes=10),
    enable_reconfigure: bool = False,
) -> _C.ProcessGroupNccl:
    """Create a process group on NCCL without ``init_process_group``.

    With ``enable_reconfigure`` it is formed by ``reconfigure``, with members that need
    no store in common; otherwise the ranks meet in the store when it is first used.
    """
    mine = NcclOptions() if options is None else options.clone()
    mine._timeout = timeout
    mine.enable_reconfigure |= enable_reconfigure
    group = _C.ProcessGroupNccl(store, rank, size, mine)
    _end_with_process(group)
    return group


def pin(memory: torch.Tensor) -> _C.PinnedMemory:
    """Pin bytes of the host, so that a GPU copies into them by itself. Close it.

    Raises WeightSyncError where CUDA refuses.
    """
    return _C.PinnedMemory(memory)


def _end_with_process(group: _C.ProcessGroupShm | _C.ProcessGroupNccl) -> None:
    if not _groups:
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)  # last in, so first out: before the runtimes end
    _groups.add(group)


def _end_groups() -> None:
    for group in list(_groups):
        group.abort()


def dump_trace(prefix: str | None = None) -> Path:
    """Write what the flight recorder of this process holds; return the JSON file.

    Args:
        prefix: With what the names of the files begin; the rank follows. None is the
            prefix of the options or the environment, see docs/tracing.md.

    Raises:
        PlanError: there is no prefix.
        WeightSyncError: a file cannot be written.
    """
    json, _ = _C.dump_trace(prefix or "", "asked for by the program")
    return Path(json)


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


def _create_nccl(options: Any, backend_options: Any) -> _C.ProcessGroupNccl | None:
    mine = options_from(backend_options, NcclOptions)
    mine._timeout = choose_timeout(options.timeout, mine._timeout)
    mine.group_name = options.group_id
    mine.global_ranks_in_group = options.global_ranks_in_group
    mine.enable_reconfigure |= options.enable_reconfigure
    mine.config.comm_name = mine.config.comm_name or mine.group_desc
    # Of such a name are groups whose members make them without the others.
    alone = re.fullmatch("[0-9a-f]{40}", options.group_id) is not None
    source = None if alone else options.split_from
    if isinstance(source, _C.ProcessGroupNccl) and not mine.enable_reconfigure:
        group = source.split(options.store, options.global_ranks_in_group, mine)
        if group is not None:
            _end_with_process(group)
        return group
    if source:
        # What torch lets the others do, for it expects all to split.
        everybody: Any = dist.group.WORLD
        source.perform_nocolor_split(everybody.bound_device_id)
    group = _C.ProcessGroupNccl(
        options.store, options.group_rank, options.group_size, mine
    )
    _end_with_process(group)
    return group


def implementation_of(
    group: dist.ProcessGroup, device: str | torch.device = "cuda"
) -> str:
    """Return the package that a group's backend for a device comes from.

    That is ``weightsync`` for ours and ``torch`` for torch's own, whatever the name is
    that the group was made with.
    """
    found: Any = group._get_backend(torch.device(device))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a class of torch's around every backend.
    found = getattr(found, "wrapped_pg", found)
    return type(found).__module__.partition(".")[0]


def use_as_nccl2() -> None:
    """Let the name ``nccl2`` mean ours in this process; nothing if it does already.

    Raises:
        PlanError: a group of that name exists, or another package has the name.
    """
    if _registrar(NCCL2) == __name__:
        return
    if any(NCCL2 in re.split("[,:]", name) for name in _names_of_groups()):
        message = f"{NCCL2} cannot be taken over: a process group of that name exists"
        raise PlanError(message)
    other = _registrar(NCCL2)
    if other and other.partition(".")[0] != "torch":
        message = f"{NCCL2} cannot be taken over: {other} has registered that name"
        raise PlanError(message)
    dist.Backend.register_backend(
        NCCL2, _create_nccl, extended_api=True, devices=["cuda"]
    )


def _names_of_groups() -> list[str]:
    """Return what the groups were made with, such as ``cpu:gloo,cuda:nccl2``."""
    # torch has no public way to list them.
    world = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage] # no other
    return [str(each) for each in world.pg_backend_config.values()]


def _registrar(name: str) -> str:
    """Return the module that registered a name; empty if none has."""
    plugins = dist.Backend._plugins  # pyright: ignore[reportPrivateUsage] # no other
    plugin = plugins.get(name.upper())
    return "" if plugin is None else plugin.creator_fn.__module__


def _is_taken(name: str) -> bool:
    """Whether torch or another package has a backend of that name, loaded or not."""
    built_in = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
    if built_in or _registrar(name):
        return True
    found = entry_points(group="torch.distributed.backends")
    # torch announces its own even where it is built without them.
    return any(
        each.name.lower() == name and not each.module.startswith("torch.")
        for each in found
    )


def _register(name: str, creator: Callable[..., Any], device: str) -> None:
    """Register a name of our own; nothing if that was done."""
    other = _registrar(name)
    if other == __name__:
        return
    if other:
        message = f"{other} has registered a backend {name}, which is ours"
        raise UnsupportedError(message)
    dist.Backend.register_backend(name, creator, extended_api=True, devices=[device])


def register() -> None:
    """Register the backends with ``torch.distributed``; nothing if that was done.

    torch calls it for a name that it does not know, through the package's entry points.

    Raises:
        UnsupportedError: another package has registered one of the names.
    """
    _register(SHM, _create, "cpu")
    _register(NCCL, _create_nccl, "cuda")
    if not _is_taken(NCCL2):
        _register(NCCL2, _create_nccl, "cuda")


_check_torch()
register()
