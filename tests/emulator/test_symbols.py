"""The emulator has every function that the installed torch and NCCL name.

A new torch, or a new NCCL, shows here what is missing.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch

from weightsync import testing
from weightsync.testing.libraries import (
    DRIVER,
    MANAGEMENT,
    NCCL,
    RUNTIME,
    find_libraries,
    library_folders,
)

pytestmark = testing.requires_emulator()

TORCH = Path(torch.__file__).parent
# libcufile has a library of its own, which needs no GPU to be loaded.
PATTERNS = {
    RUNTIME: r"(__)?cuda[A-Z]\w*",
    DRIVER: r"cu(?!File)[A-Z]\w*",
    NCCL: r"p?nccl[A-Z]\w*",
}
LEAST = {RUNTIME: 100, DRIVER: 20, NCCL: 45}
"""So many are expected at least, in all torch libraries: else nm found nothing."""

NOT_SUPPORTED = {
    *("cuMulticastAddDevice", "cuMulticastBindMem"),
    *("cuMulticastCreate", "cuMulticastUnbind"),
    *("cuCtxFromGreenCtx", "cuGreenCtxCreate", "cuGreenCtxDestroy"),
    *("cuGreenCtxStreamCreate", "cuDevSmResourceSplitByCount"),
    *("cuDeviceGetDevResource", "cuDevResourceGenerateDesc"),
    *("cuLogsRegisterCallback", "cuLogsUnregisterCallback"),
}
"""For these torch gets a function that says so."""


def symbols(library: Path, *options: str) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True
    )
    # Without the version that stands behind an @.
    return {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}


@cache
def exported(library: str) -> set[str]:
    return symbols(find_libraries(library_folders()) / library, "--defined-only")


@cache
def needed() -> dict[str, set[str]]:
    """What each library of torch leaves to others."""
    return {
        library.name: symbols(library, "--undefined-only")
        for library in (TORCH / "lib").glob("lib*.so*")
    }


def nccl(name: str) -> Path:
    """A file of the package of NCCL that torch has installed."""
    (package,) = {
        found
        for found in metadata.packages_distributions().get("nvidia", [])
        if found.startswith("nvidia-nccl-")
    }
    (path,) = [
        file for file in metadata.files(package) or [] if file.name == Path(name).name
    ]
    return Path(str(path.locate()))


@pytest.mark.parametrize("library", PATTERNS)
def test_every_symbol_that_torch_references_is_there(library: str) -> None:
    wanted = {
        (user, name)
        for user, names in needed().items()
        for name in names
        if re.fullmatch(PATTERNS[library], name)
    }

    assert len({name for _, name in wanted}) >= LEAST[library]
    assert [] == sorted(pair for pair in wanted if pair[1] not in exported(library))


def looked_up(prefix: str) -> set[str]:
    """What torch finds by name while it runs: its own header has the list."""
    header = (TORCH / "include" / "c10" / "cuda" / "driver_api.h").read_text()
    return set(re.findall(rf"\b_\(({prefix}[A-Z]\w*)", header))


def test_every_function_of_the_driver_that_torch_looks_up_is_there() -> None:
    wanted = looked_up("cu")

    assert len(wanted) >= 30
    assert wanted & NOT_SUPPORTED == wanted - exported(DRIVER)


def test_every_function_of_nvml_that_torch_looks_up_is_there() -> None:
    wanted = looked_up("nvml")

    assert len(wanted) >= 5
    assert [] == sorted(wanted - exported(MANAGEMENT))


def test_every_function_of_nccl_is_there() -> None:
    declared = set(re.findall(r"\b(p?nccl[A-Z]\w*)\(", nccl("nccl.h").read_text()))

    assert len(declared) >= 100
    assert [] == sorted(declared - exported(NCCL))


def test_every_symbol_that_nccl_exports_is_there() -> None:
    theirs = {
        name
        for name in symbols(nccl("libnccl.so.2"), "--defined-only")
        if re.fullmatch(PATTERNS[NCCL], name)
    }

    assert len(theirs) >= 100
    assert [] == sorted(theirs - exported(NCCL))
