"""torch on the emulated CUDA: unmodified, in a child with the libraries in place."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync import testing

pytestmark = testing.requires_emulator()

PROGRAMS = Path(__file__).with_name("cuda_programs.py")


def run(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAMS), *names],
        env={**os.environ, **testing.environment()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def seconds_of_import(environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", "import torch; torch.cuda.is_available()"],
        env=environment,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.timeout(120)
def test_torch_moves_bytes_on_eight_devices() -> None:
    ended = run(
        "devices",
        "memory_pools_and_statistics",
        "bytes_on_every_device",
        "copies_between_devices",
        "streams_and_events",
    )

    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.timeout(120)
def test_a_kernel_fails_with_its_name() -> None:
    ended = run("a_kernel")

    assert 0 == ended.returncode, ended.stderr
    assert ended.stderr.startswith("weightsync emulator: a kernel was launched")


@pytest.mark.timeout(120)
def test_a_kernel_that_is_compiled_at_run_time_fails_too() -> None:
    ended = run("a_kernel_compiled_at_run_time")

    assert 0 == ended.returncode, ended.stderr


@pytest.mark.timeout(120)
def test_segments_of_the_allocator_may_expand() -> None:
    ended = run("expandable_segments")

    assert 0 == ended.returncode, ended.stderr


@pytest.mark.timeout(120)
def test_a_process_reads_the_tensor_of_another() -> None:
    ended = run("tensors_of_other_processes")

    assert 0 == ended.returncode, ended.stderr


@pytest.mark.timeout(120)
def test_a_device_runs_out_of_memory() -> None:
    ended = run("out_of_memory")

    assert 0 == ended.returncode, ended.stderr


@pytest.mark.timeout(120)
def test_starting_costs_less_than_a_second_of_work() -> None:
    plain = dict(os.environ)
    emulated = {**plain, **testing.environment()}
    seconds_of_import(plain)  # fills the caches
    extra = min(
        seconds_of_import(emulated) - seconds_of_import(plain) for _ in range(2)
    )

    assert extra < 1.0
