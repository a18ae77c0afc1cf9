"""Where the emulator is, and the environment that puts a process on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from weightsync.errors import PlanError, UnsupportedError
from weightsync.testing.libraries import (
    NCCL,
    RUNTIME,
    check_torch,
    find_libraries,
    library_folders,
    torch_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DEFAULT_GPUS: Final = 8
DEFAULT_NCCL: Final = "2.30.7"
MAX_GPUS: Final = 64
NCCL_VERSIONS: Final = ("2.29.7", "2.30.7", "2.31.2", "2.32.3")

HANG_EXIT_CODE: Final = 86
"""With which a process ends whose hang was diagnosed."""


def available() -> bool:
    """Whether programs can run on emulated GPUs here."""
    return not reason()


def reason() -> str:
    """Say why there is no emulator here, and what to do; empty where there is one."""
    try:
        check_torch(torch_folder())
        find_libraries(library_folders())
    except UnsupportedError as error:
        return str(error)
    return ""


def environment(
    *,
    gpus: int = DEFAULT_GPUS,
    memory: int | None = None,
    nccl: str = DEFAULT_NCCL,
    faults: str | Iterable[str] = (),
    hang_seconds: float | None = None,
) -> dict[str, str]:
    """Return the variables that put a new process, and its children, on the emulator.

    They go over the variables that this process has: ``{**os.environ, **these}``.

    Args:
        gpus: How many GPUs there are, all of them on one machine.
        memory: Bytes of each GPU; 16 GiB unless given. Unused memory costs nothing.
        nccl: Whose version's behaviour is emulated, one of ``NCCL_VERSIONS``.
        faults: What shall go wrong, see docs/emulator.md; or ``@`` and a file of it.
        hang_seconds: After how long a hang is diagnosed; 60 unless given, 0 is never.

    Raises PlanError for values that cannot be, UnsupportedError where there is no
    emulator.
    """
    check_torch(torch_folder())
    folder = find_libraries(library_folders())
    if not 0 <= gpus <= MAX_GPUS:
        raise PlanError(f"gpus is {gpus}, but must be from 0 to {MAX_GPUS}")
    if nccl not in NCCL_VERSIONS:
        known = ", ".join(NCCL_VERSIONS)
        raise PlanError(f"nccl is {nccl!r}, but must be one of {known}")
    found = {
        "LD_PRELOAD": _joined(_given("LD_PRELOAD"), folder / RUNTIME, folder / NCCL),
        "LD_LIBRARY_PATH": _joined(folder, _given("LD_LIBRARY_PATH")),
        "WEIGHTSYNC_NCCL_LIBRARY": str(folder / NCCL),
        "WEIGHTSYNC_EMULATOR_GPUS": str(gpus),
        "WEIGHTSYNC_EMULATOR_NCCL": nccl,
        "WEIGHTSYNC_EMULATOR_FAULTS": _join_faults(faults),
    }
    if memory is not None:
        if memory < 1:
            raise PlanError(f"memory is {memory}, but must be at least one byte")
        found["WEIGHTSYNC_EMULATOR_MEMORY"] = str(memory)
    if hang_seconds is not None:
        if not 0 <= hang_seconds < 1e9:
            raise PlanError(f"hang_seconds is {hang_seconds}, but must be 0 or more")
        found["WEIGHTSYNC_EMULATOR_HANG_SECONDS"] = f"{hang_seconds:g}"
    return found


def _given(name: str) -> str:
    return os.environ.get(name, "")


def _joined(*parts: Path | str) -> str:
    texts = list(map(str, parts))
    # An environment that is emulated already stays as it is.
    entries = [entry for text in texts for entry in text.split(":") if entry]
    return ":".join(dict.fromkeys(entries))


def _join_faults(faults: str | Iterable[str]) -> str:
    entries = [faults] if isinstance(faults, str) else list(faults)
    if len(entries) > 1 and any(entry.startswith("@") for entry in entries):
        raise PlanError(f"faults are {entries}, but a file of faults stands alone")
    return "; ".join(entries)
