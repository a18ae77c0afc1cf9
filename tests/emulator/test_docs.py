"""docs/emulator.md: its example runs, its faults are those of the sources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "emulator.md").read_text()
SPECIFICATION = (ROOT / "csrc" / "emulator" / "fault_spec.h").read_text()

# It starts a program that starts another one, and each imports torch.
pytestmark = pytest.mark.timeout(120)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_is_a_test_that_passes(tmp_path: Path) -> None:
    (program,) = blocks("python")
    (tmp_path / "test_example.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert "1 passed" in done.stdout, done.stdout


def test_every_operation_is_listed() -> None:
    table = PAGE.partition("| operation |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`([a-z_]+)`", table)) - {"any"}
    known = set(re.findall(r'each\(k\w+, "([a-z_]+)", ', SPECIFICATION))

    assert known == listed


def test_the_faults_that_are_shown_can_be_read() -> None:
    from weightsync import testing

    (faults,) = [block for block in blocks("text") if "no-symmetric" in block]

    assert [1] == testing.emulated("operator:index", 1, args=[1], faults=faults)
