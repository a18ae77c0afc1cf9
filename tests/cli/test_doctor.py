"""``weightsync doctor``: what it finds, with the GPUs emulated and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync import testing
from weightsync.cli.nccl_faults import FAULTS, faults_of

pytestmark = pytest.mark.timeout(120)


def doctor(*options: str, **variables: str) -> str:
    """Run the command as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli", "doctor", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(**variables: str) -> dict[str, Any]:
    return dict(json.loads(doctor("--json", **variables)))


def test_it_names_torch_and_the_one_that_the_core_was_built_for() -> None:
    said = found()["torch"]

    assert torch.__version__ == said["version"]
    assert torch.__version__.startswith(said["core_built_for"] + ".")


@testing.requires_emulator()
def test_on_the_emulator_it_finds_all_of_it() -> None:
    said = found(**testing.environment(gpus=3, nccl="2.31.2"))

    assert "2.31.2" == said["nccl"]["version"]
    assert "_emulator" == Path(said["nccl"]["path"]).parent.name
    assert {None} == {fault["fixed"] for fault in said["nccl"]["faults"]}
    assert said["emulator"]["active"]
    assert "" == said["driver"]["problem"]
    assert [[1, 2], [0, 2], [0, 1]] == [
        device["peers"] for device in said["driver"]["devices"]
    ]
    assert all(device["virtual_memory"] for device in said["driver"]["devices"])


def test_a_library_that_cannot_be_opened_is_a_finding() -> None:
    said = found(WEIGHTSYNC_NCCL_LIBRARY="/nowhere/libnccl.so.2")

    assert "/nowhere/libnccl.so.2" in said["nccl"]["problem"]
    assert not said["emulator"]["active"]


def test_without_cuda_python_it_says_so(tmp_path: Path) -> None:
    # Found before the installed one, if there is one.
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").touch()
    said = doctor(PYTHONPATH=str(tmp_path))

    assert "cuda-python is not installed" in said


@testing.requires_emulator()
def test_it_speaks_to_people_too() -> None:
    lines = doctor(**testing.environment(gpus=2)).splitlines()

    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert ["torch", "core", "NCCL", "driver", "GPU 0", "GPU 1", "emulator"] == heads
    assert any("issues/2198" in line and "2.31.2" in line for line in lines)
    assert "            avoided: windows are whole allocations" in lines
    assert "pushes 2.30.7 to 2.32" in lines[3]
    assert "direct access (P2P) to 1" in lines[-3]
    assert lines[-1].endswith("are emulated")


@pytest.mark.parametrize(
    ("version", "issues"),
    [
        ("2.29.2", {2198, 2119, 1963}),
        ("2.29.7", {2198, 2119}),
        ("2.30.7", {2198}),
        ("2.31.2", set()),
    ],
)
def test_faults_are_those_of_the_version(version: str, issues: set[int]) -> None:
    assert issues == {fault.issue for fault in faults_of(version)} - {None}


def test_what_is_wrong_with_2_30_7_is_avoided_or_set_apart() -> None:
    (met,) = [fault.text for fault in faults_of("2.30.7") if not fault.avoided]

    assert "weightsync sets such a link apart" in met


def test_a_fault_begins_before_it_is_repaired() -> None:
    assert [] == [each for each in FAULTS if each.fixed and each.since >= each.fixed]
