"""What there is on this machine that weightsync depends on, found out step by step.

Nothing here raises for what is missing: that is a finding, too.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from weightsync import backend
from weightsync.cli.nccl_faults import Fault, faults_of
from weightsync.errors import WeightSyncError
from weightsync.testing.environment import reason
from weightsync.testing.libraries import RUNTIME, library_folders

KERNEL_DRIVER: Final = Path("/proc/driver/nvidia/version")

NO_CUDA_PYTHON: Final = (
    "cuda-python is not installed, so the driver was not asked: "
    "pip install cuda-bindings"
)


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch of this environment, and the one that the core was built for."""

    version: str
    cuda: str | None
    core_built_for: str


@dataclass(frozen=True, slots=True)
class Nccl:
    """The NCCL that a group would use, or why there is none."""

    version: str = ""
    path: str = ""
    faults: list[Fault] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: whether memory can be mapped as windows need it, and which peers."""

    index: int
    name: str
    virtual_memory: bool
    peers: list[int]


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver of CUDA, and the GPUs that it offers."""

    kernel: str = ""
    cuda: str = ""
    devices: list[Device] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Emulator:
    """Whether this process runs on the emulator, and whether one could."""

    active: bool
    available: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything."""

    torch: Torch
    nccl: Nccl
    driver: Driver
    emulator: Emulator


def find() -> Findings:
    """Look at everything."""
    nccl = find_nccl()
    return Findings(
        Torch(torch.__version__, torch.version.cuda, backend.core_version()),
        nccl,
        find_driver(),
        find_emulator(nccl),
    )


def find_nccl() -> Nccl:
    """Open the NCCL that a group without options would open."""
    try:
        version, path = backend.find_nccl()
    except WeightSyncError as error:
        return Nccl(problem=str(error))
    return Nccl(version, path, faults_of(version))


def find_emulator(nccl: Nccl) -> Emulator:
    """Tell the emulator by the libraries that are in place."""
    preloaded = RUNTIME in os.environ.get("LD_PRELOAD", "")
    ours = bool(nccl.path) and Path(nccl.path).parent in library_folders()
    problem = reason()
    return Emulator(preloaded and ours, not problem, problem)


def find_driver() -> Driver:
    """Ask the driver, through cuda-python where it is installed."""
    kernel = ""
    if KERNEL_DRIVER.is_file():
        kernel = KERNEL_DRIVER.read_text().partition("\n")[0]
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return Driver(kernel, problem=NO_CUDA_PYTHON)
    try:
        version = _asked(cuda, "cuDriverGetVersion")
        _asked(cuda, "cuInit", 0)
        devices = _devices(cuda)
    # cuda-python raises RuntimeError where there is no libcuda.
    except (OSError, RuntimeError) as error:
        return Driver(kernel, problem=f"there is no driver: {error}")
    return Driver(kernel, f"{version // 1000}.{version % 1000 // 10}", devices)


def _devices(cuda: Any) -> list[Device]:
    handles = [
        _asked(cuda, "cuDeviceGet", index)
        for index in range(_asked(cuda, "cuDeviceGetCount"))
    ]
    attribute = cuda.CUdevice_attribute
    mapped = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return [
        Device(
            index,
            _asked(cuda, "cuDeviceGetName", 256, handle).split(b"\0")[0].decode(),
            bool(_asked(cuda, "cuDeviceGetAttribute", mapped, handle)),
            [
                peer
                for peer, other in enumerate(handles)
                if peer != index
                and _asked(cuda, "cuDeviceCanAccessPeer", handle, other)
            ],
        )
        for index, handle in enumerate(handles)
    ]


def _asked(cuda: Any, name: str, *arguments: Any) -> Any:
    code, *answer = getattr(cuda, name)(*arguments)
    if code != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed with {code.name}")
    return answer[0] if answer else None
