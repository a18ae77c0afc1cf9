"""docs/emulator-contract.md: every test that it names is in the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "emulator-contract.md").read_text()
TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", re.MULTILINE)
NAME = re.compile(r"`([A-Z]\w+\.\w{8,})`")


def known_tests() -> set[str]:
    sources = (ROOT / "csrc").rglob("*_test.cpp")
    found = (TEST.findall(source.read_text()) for source in sources)
    return {f"{suite}.{test}" for tests in found for suite, test in tests}


def test_every_test_that_is_named_exists() -> None:
    named = set(NAME.findall(PAGE))

    assert set() == named - known_tests()


def test_every_row_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row.rstrip(" |").endswith("shown by")]
    without = [row for row in rows if row not in heads and not NAME.search(row)]

    assert [] == without


def test_no_row_is_shown_by_a_test_that_does_not_run_by_itself() -> None:
    named = NAME.findall(PAGE)

    assert [] == [name for name in named if "DISABLED_" in name]
