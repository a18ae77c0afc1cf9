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

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.engines import Engine
    from tests.chaos.scenario import Scenario

OFTEN = 30
ALL = 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each scenario: all with one seed after the other."""
    if "seed" not in metafunc.fixturenames:
        return
    first, count = (
        metafunc.config.option.chaos_seed,
        metafunc.config.option.chaos_scenarios,
    )
    slow = [pytest.mark.slow] if count is None else []
    seeds = [
        pytest.param(first + index, marks=slow if index >= OFTEN else [])
        for index in range(ALL if count is None else count)
    ]
    metafunc.parametrize("seed", seeds)


def _address(scenario: Scenario, folder: Path) -> str:
    if scenario.store == "tcp":
        return free_address()
    return f"file://{folder}/store"


def _play(scenario: Scenario, engine: Engine, folder: Path) -> list[str]:
    """Play a scenario; return what was wrong, with all that is needed to see why."""
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
    found += [f"left in /dev/shm: {left}"] if left else []
    return [*found, str(scenario), *stage.log] if found else []


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_happens_everybody_has_a_whole_version_or_an_error(
    engine: str, seed: int, tmp_path: Path
) -> None:
    found = _play(draw(seed), ENGINES[engine], tmp_path)

    assert not found, "\n".join([f"repeat with --chaos-seed {seed}", *found])
