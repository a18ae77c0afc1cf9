"""The backends are those that they are called, and the faults are documented."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch.distributed as dist

from tests.conformance.backends import FAULTS
from tests.conformance.group import job
from weightsync import testing

CLASSES: Final = {
    "nccl": "ProcessGroupNCCL",
    "nccl2": "ProcessGroupNCCL2",
    "weightsync-nccl2": "ProcessGroupNccl",
}

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "conformance.md"


def class_of_backend(backend: str) -> list[str]:
    with job(backend) as device:
        group = dist.group.WORLD
        assert group is not None
        return [type(group._get_backend(device)).__name__, dist.get_backend()]


def test_a_backend_is_of_its_own_class(backend: str) -> None:
    """torch 2.15 makes an `nccl2` of the name `nccl` unless it is told not to."""
    found = testing.emulated(class_of_backend, 1, args=[backend])

    assert [[CLASSES[backend], backend]] == found


def test_the_documented_faults_are_the_known_ones() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]

    expected = {
        (f"`{fault.backend}`", ", ".join(fault.torch), fault.reason) for fault in FAULTS
    }
    assert expected == {tuple(row) for row in rows}


def test_every_fault_is_of_a_test_that_exists() -> None:
    sources = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    names = {fault.test.partition("[")[0] for fault in FAULTS}

    assert set() == {name for name in names if f"def {name}(" not in sources}
