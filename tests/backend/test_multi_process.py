"""torch's own harness for tests in many processes, on ``weightsync-nccl2``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

# Every process imports torch and its harness, which takes seconds on a small machine.
pytestmark = pytest.mark.timeout(150)

REPORTS: Final = ("CI", "GITHUB_ACTIONS", "SANDCASTLE", "TEST_IN_SUBPROCESS")
PROGRAM: Final = Path(__file__).with_name("multi_process.py")


def run_cases(*names: str) -> tuple[int, str, str]:
    """Run cases as their author would; the exit code, the last line, and the output."""
    emulate = ("-m", "weightsync.cli", "emulate", "--gpus", "2", "--hang-seconds", "60")
    # Where these are set torch writes its reports with a package of their own.
    ours = {name: os.environ[name] for name in os.environ if name not in REPORTS}
    done = subprocess.run(
        [sys.executable, *emulate, "--", sys.executable, str(PROGRAM), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=140,
        env=ours,
    )
    lines = done.stdout.splitlines()
    return done.returncode, lines[-1] if lines else "", done.stdout


def test_a_case_with_a_process_for_each_rank_passes() -> None:
    code, last, output = run_cases("Working.test_exchanges")

    assert (0, "OK") == (code, last), output


@pytest.mark.slow
def test_a_case_for_more_gpus_than_there_are_is_skipped() -> None:
    code, last, output = run_cases("Working.test_more_gpus_than_there_are")

    assert (0, "OK (skipped=1)") == (code, last), output


@pytest.mark.slow
def test_the_error_of_a_rank_is_that_of_its_case() -> None:
    code, last, output = run_cases("Failing.test_one_rank_fails")

    assert (1, "FAILED (errors=1)") == (code, last), output
    assert "Process 1 exited with error code 10" in output
    assert "rank 1 found what it should not" in output
