"""What a figure depends on besides the code, and when it means little."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from weightsync.bench import memory

BUSY: float = 0.25
"""Load per core, before we begin, from which others disturb the figures."""


class Environment(msgspec.Struct, frozen=True):
    """Machine and software; ``load`` is the average of the last minute at the start."""

    system: str
    cpu: str
    cores: int
    memory: int
    load: float
    python: str
    torch: str
    weightsync: str

    @classmethod
    def here(cls) -> Environment:
        """Describe this machine, now."""
        return cls(
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory=memory.total(),
            load=os.getloadavg()[0],
            python=platform.python_version(),
            torch=str(torch.__version__),
            weightsync=_version(),
        )

    def warnings(self, processes: int) -> list[str]:
        """Say what makes figures of so many processes doubtful here."""
        found: list[str] = []
        if self.load > BUSY * self.cores:
            found.append(
                f"the load is {self.load:.2f} on {self.cores} cores: other work runs "
                "here, and the figures mean little"
            )
        if processes > self.cores:
            found.append(
                f"{processes} processes share {self.cores} cores: they wait for each "
                "other, and latencies mean little"
            )
        return found


def _cpu() -> str:
    """The model, as the kernel names it."""
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match is not None else platform.processor() or "unknown"


def _version() -> str:
    try:
        return metadata.version("weightsync")
    except metadata.PackageNotFoundError:
        return "not installed"
