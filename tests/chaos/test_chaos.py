"""Random scenarios of joining, leaving, dying and freezing, over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.engines import ENGINES
from tests.chaos.finale import finish
from tests.chaos.invariants import faults
from tests.chaos.scenario import draw
from tests.chaos.stage import Stage
from tests.processes import driven
from tests.processes.harness import free_address
from weightsync import testing

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from tests.chaos.engines import Engine
    from tests.chaos.scenario import Scenario

COUNTS = {"shm": (30, 300), "nccl": (6, 100)}
"""How many scenarios are played often, and how many there are."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each scenario: all with one seed after the other."""
    if "seed" in metafunc.fixturenames:
        option = metafunc.config.option
        cases = [
            case
            for engine in ENGINES
            for case in _cases(engine, option.chaos_seed, option.chaos_scenarios)
        ]
        metafunc.parametrize(("engine", "seed"), cases)


def _cases(engine: str, first: int, asked: int | None) -> list[ParameterSet]:
    """The scenarios of an engine; where none were asked for, most of them are slow."""
    often, count = COUNTS[engine]
    slow = [pytest.mark.slow] if asked is None else []
    marks = [testing.requires_emulator()] if engine == "nccl" else []
    return [
        pytest.param(engine, first + index, marks=marks + slow * (index >= often))
        for index in range(count if asked is None else min(asked, count))
    ]


def _address(scenario: Scenario, folder: Path) -> str:
    if scenario.store == "tcp":
        return free_address()
    return f"file://{folder}/store"


def _play(scenario: Scenario, engine: Engine, folder: Path) -> list[str]:
    """Play a scenario; print what happens, and return what was wrong."""
    print(scenario)
    before = driven.in_shared_memory()
    processes = engine.processes()
    stage = Stage(scenario, engine, processes, _address(scenario, folder))
    error: list[str] = []
    try:
        stage.play()
        finish(stage)
    except Exception as raised:  # noqa: BLE001 -- it is reported with the scenario.
        error = [f"{type(raised).__name__}: {raised}"]
    finally:
        processes.end()
    found = error + faults(stage)
    left = driven.in_shared_memory() - before
    return found + ([f"left in /dev/shm: {left}"] if left else [])


def test_whatever_happens_everybody_has_a_whole_version_or_an_error(
    engine: str, seed: int, tmp_path: Path
) -> None:
    chosen = ENGINES[engine]
    found = _play(draw(seed, chosen.modes), chosen, tmp_path)

    assert not found, "\n".join([f"repeat with --chaos-seed {seed}", *found])
