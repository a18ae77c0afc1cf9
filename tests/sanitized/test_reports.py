"""The run of scripts/sanitize fails for a fault in any process, and says which."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from weightsync import testing
from weightsync.testing.libraries import LIBRARIES, find_libraries, library_folders

if TYPE_CHECKING:
    from collections.abc import Callable

REPORTS: Final = os.environ["WEIGHTSYNC_SANITIZED"]
EMULATOR: Final = find_libraries(library_folders())
CHECK: Final = Path(__file__).parents[2] / "scripts" / "sanitizers" / "reports.py"

FAULTS: Final = {
    "weightsync_overrun": "heap-buffer-overflow",
    "weightsync_overflow": "signed integer overflow",
    "weightsync_leak": "Direct leak of 100 byte(s)",
    "weightsync_stray": "SEGV on unknown address",
}


def commit_one_each() -> None:
    fault = list(FAULTS)[int(os.environ["RANK"])]
    getattr(ctypes.CDLL(str(EMULATOR / "libweightsync_faulty.so")), fault)(100)


def commit_and_be_killed() -> None:
    if os.fork() == 0:
        ctypes.CDLL(str(EMULATOR / "libweightsync_faulty.so")).weightsync_overrun(100)
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def commit_none() -> list[int]:
    return [1]


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[int, str]]:
    """Have reports written elsewhere; return the exit code and output of the check."""
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):
        monkeypatch.setenv(name, os.environ[name].replace(REPORTS, str(tmp_path)))

    def check() -> tuple[int, str]:
        command = [sys.executable, str(CHECK), str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.returncode, found.stdout

    return check


def test_the_extension_and_the_emulator_are_instrumented() -> None:
    extensions = list(EMULATOR.parent.glob("_C.*"))
    libraries = [*extensions, *(EMULATOR / name for name in LIBRARIES)]

    assert 1 == len(extensions)
    assert [
        library.name
        for library in libraries
        if b"__asan_init" in (content := library.read_bytes())
        and b"__ubsan_" in content
    ] == [library.name for library in libraries]


def test_a_fault_in_a_rank_fails_the_run_though_no_test_fails(
    checked: Callable[[], tuple[int, str]],
) -> None:
    testing.outcomes(commit_one_each, len(FAULTS))
    code, said = checked()

    assert 1 == code
    assert [*FAULTS] == [name for name in FAULTS if f"in {name} " in said]
    assert [*FAULTS.values()] == [words for words in FAULTS.values() if words in said]


def test_a_fault_before_a_kill_fails_the_run(
    checked: Callable[[], tuple[int, str]],
) -> None:
    testing.outcomes(commit_and_be_killed, 1)
    code, said = checked()

    assert 1 == code
    assert "weightsync_overrun" in said


def test_ranks_without_a_fault_leave_the_run_as_it_is(
    checked: Callable[[], tuple[int, str]],
) -> None:
    testing.emulated(commit_none, 2)

    assert (0, "\n") == checked()
