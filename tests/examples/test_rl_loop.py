"""The example learns, its figures add up, and it ends when a process of it dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop" / "rl_loop.py"
SMALL = ("--steps", "200", "--prompts", "8", "--learning-rate", "0.001")
MARGIN = 0.25
MAX_STALENESS = 4
RATIO_ERROR = 1e-4  # rounding; two tensors exchanged would make it a hundredth


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_to_the_end(file: Path, *options: str) -> dict[str, Any]:
    limits = ("--margin", str(MARGIN), "--max-staleness", str(MAX_STALENESS))
    written = ("--time-limit", "140", "--json", str(file))
    with start(*limits, *written, *options) as example:
        output, _ = example.communicate(timeout=160)

    assert example.returncode == 0, output
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_to_the_end(tmp_path_factory.mktemp("rl_loop") / "figures.json")


@pytest.mark.timeout(170)
def test_the_reward_rises_clearly(figures: dict[str, Any]) -> None:
    assert figures["reward_start"] < 0.3
    assert figures["reward_end"] >= figures["reward_start"] + MARGIN


@pytest.mark.timeout(170)
def test_every_step_is_a_version_and_generators_take_them_in(
    figures: dict[str, Any],
) -> None:
    assert figures["versions"] == 201
    assert figures["switches"] > 100
    assert figures["skipped"] == 0


@pytest.mark.timeout(170)
def test_every_sample_has_a_version_and_none_is_too_old(
    figures: dict[str, Any],
) -> None:
    assert figures["samples"] == 200 * 8 * 16
    assert figures["sample_version_min"] >= 1
    assert figures["sample_version_max"] > 150
    assert figures["staleness_min"] >= 0
    assert figures["staleness_max"] <= MAX_STALENESS


@pytest.mark.timeout(170)
def test_generators_sample_with_exactly_the_weights_of_the_trainer(
    figures: dict[str, Any],
) -> None:
    assert figures["ratio_error"] is not None
    assert figures["ratio_error"] < RATIO_ERROR


@pytest.mark.timeout(170)
def test_sharded_trainers_teach_generators_with_fused_weights(tmp_path: Path) -> None:
    options = ("--fsdp", "--fused", "--steps", "80")
    figures = run_to_the_end(tmp_path / "figures.json", *options)

    assert figures["options"]["trainers"] == 2
    assert figures["versions"] == 81
    assert figures["samples"] == 2 * 80 * 8 * 16
    assert figures["skipped"] == 0
    assert figures["reward_end"] >= figures["reward_start"] + MARGIN
    assert figures["ratio_error"] < RATIO_ERROR


@pytest.mark.timeout(100)
def test_a_killed_generator_ends_the_run_and_is_named() -> None:
    with start("--steps", "1000", "--time-limit", "90") as example:
        assert example.stdout is not None
        started = example.stdout.readline()
        killed = re.search(r"gen-1 \(pid (\d+)\)", started)
        assert killed is not None, started
        assert any(line.startswith("step") for line in example.stdout)
        os.kill(int(killed[1]), signal.SIGKILL)
        output, _ = example.communicate(timeout=60)

    assert example.returncode == 1
    assert f"the run failed: gen-1 (pid {killed[1]}) was killed by SIGKILL" in output


@pytest.mark.timeout(170)
def test_it_learns_while_generators_die_freeze_and_come(tmp_path: Path) -> None:
    options = ("--chaos", "--generators", "3", "--steps", "150", "--margin", "0.15")
    figures = run_to_the_end(tmp_path / "figures.json", *options)

    strikes = [strike.partition(" ")[2] for strike in figures["strikes"]]
    assert ["killed", "frozen"] == strikes[:2]
    assert figures["lost"] >= 2
    assert figures["joined"] >= 4  # all three, and one of them again
    assert figures["versions"] == 151
    assert figures["reward_end"] >= figures["reward_start"] + 0.15
    assert figures["ratio_error"] < RATIO_ERROR
