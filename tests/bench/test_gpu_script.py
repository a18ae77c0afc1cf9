"""benchmarks/gpu/run.py, with steps of its test instead of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync import testing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_checked_and_that_is_no_success() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )

    assert (2, "") == (done.returncode, done.stdout)
    assert "nothing was checked" in done.stderr


def test_a_step_says_how_it_ended(script: Any) -> None:
    step = script.Step("fails", ("-c", "print('why'); raise SystemExit(3)"), 30.0)
    outcome = script.run(step, 30.0)

    assert (3, "why\n") == (outcome.code, outcome.said)


def test_a_step_that_is_out_of_time_is_killed_with_what_it_started(script: Any) -> None:
    child = "import time; time.sleep(600)"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    )
    outcome = script.run(script.Step("hangs", ("-c", program), 1.0), 1.0)

    # The child had the pipe too, so its end was read only because it ended.
    assert (-9, "\nout of time") == (outcome.code, outcome.said)


def test_the_report_lists_what_ran_and_what_was_not_checked(script: Any) -> None:
    ran = script.Step("ran", ("-c", ""), 1.0)
    lacking = script.Step("lacking", ("-c", ""), 1.0, gpus=4)
    outcomes = [
        script.Outcome(ran, 0, 1.2, "fine\n"),
        script.Outcome(lacking, None, 0.0, "needs 4 GPUs, found 1"),
    ]
    lines = script.report(outcomes).splitlines()

    assert ["| ran | 0 | 1 |", "| lacking | not run | 0 |"] == lines[6:8]
    assert "- lacking: needs 4 GPUs, found 1" in lines
    assert ["## ran", "", "```", "fine", "```"] == lines[-5:]


@testing.requires_emulator()
def test_emulated_gpus_are_named_so_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--budget", "2", "--report", file],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={**testing.environment(gpus=2), "PATH": ""},
    )

    assert "2 x weightsync emulated GPU" in file.read_text(), done.stderr
    assert "no time was left" in file.read_text()
