"""The programs of docs/layouts.md run as they are shown, and do what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.programs import (
    blocks_of,
    links_of,
    programs_of,
    refusals_of,
    sections_of,
    table_of,
)
from tests.docs.running import refused, run
from tests.processes.harness import ChildError

if TYPE_CHECKING:
    from tests.docs.programs import Program, Refusal

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
BLOCKS = blocks_of(PAGE)
PROGRAMS = {(found.section, found.role): found for found in programs_of(BLOCKS)}
REFUSALS = refusals_of(BLOCKS, "what-is-refused")

LAYOUTS = table_of(PAGE, "trainer \\ generator")
PAIRS = [(row[0], column) for row in LAYOUTS[1:] for column in LAYOUTS[0][1:]]
MODES = table_of(PAGE, "generator \\ mode")
WHOLE = [
    section
    for section, role in PROGRAMS
    if role == "generator" and (section, "trainer") in PROGRAMS
]
"""Sections with a trainer and a generator."""

pytestmark = pytest.mark.timeout(120)


def job(trainer: str, generator: str) -> list[Program]:
    return [PROGRAMS[trainer, "trainer"], PROGRAMS[generator, "generator"]]


@pytest.mark.parametrize(("trainer", "generator"), PAIRS)
def test_every_trainer_layout_goes_into_every_generator_layout(
    trainer: str, generator: str, tmp_path: Path
) -> None:
    run(tmp_path, job(trainer, generator))


@pytest.mark.parametrize("section", WHOLE)
def test_the_programs_of_a_section_do_what_it_says(
    section: str, tmp_path: Path
) -> None:
    run(tmp_path, job(section, section))


@pytest.mark.parametrize("mode", MODES[0][2:])
@pytest.mark.parametrize("section", [row[0] for row in MODES[1:]])
def test_a_generator_runs_in_the_modes_that_the_page_says(
    section: str, mode: str, tmp_path: Path
) -> None:
    (works,) = [row[MODES[0].index(mode)] for row in MODES if row[0] == section]
    programs = job(section if section in WHOLE else "plain-tensors", section)
    if works == "yes":
        run(tmp_path, programs, mode=mode)
    else:
        with pytest.raises(ChildError, match=f"UnsupportedError: .* mode '{mode}'"):
            run(tmp_path, programs, mode=mode)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.call)
def test_what_is_refused_is_refused_with_the_message_shown(refusal: Refusal) -> None:
    assert refusal.error == refused(refusal)


def test_a_program_that_expects_something_else_fails(tmp_path: Path) -> None:
    trainer, generator = job("plain-tensors", "whole-tensors")
    wrong = generator.text.replace("torch.arange(32.0)", "torch.arange(32.0) + 1")

    assert wrong != generator.text
    with pytest.raises(ChildError, match=r"assert torch\.equal"):
        run(tmp_path, [trainer, replace(generator, text=wrong)])


def test_a_process_that_ends_badly_after_its_program_fails(tmp_path: Path) -> None:
    trainer, generator = job("plain-tensors", "whole-tensors")
    added = "import os, threading\nthreading.Timer(0.1, os._exit, [3]).start()\n"

    with pytest.raises(AssertionError, match="generator ended with exit code 3"):
        run(tmp_path, [trainer, replace(generator, text=generator.text + added)])


def test_every_program_is_run_and_every_section_that_is_linked_is_there() -> None:
    sections = sections_of(PAGE)
    tested = {(trainer, "trainer") for trainer, _ in PAIRS}
    tested |= {(generator, "generator") for _, generator in PAIRS}
    tested |= {
        (section, role) for section in WHOLE for role in ("trainer", "generator")
    }

    assert PROGRAMS.keys() == tested
    assert len(sections) == len(set(sections))
    assert links_of(PAGE) <= set(sections)
    assert {"yes"} == {cell for row in LAYOUTS[1:] for cell in row[1:]}
    assert {"yes"} == {row[1] for row in MODES[1:]}
    python = [block for block in BLOCKS if block.language == "python"]
    assert len(PROGRAMS) + len(REFUSALS) + 1 == len(python)
