"""The tables that say where tests of the transport run name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.transports import ALWAYS, FILES, HOST, KERNELS


def _known() -> set[str]:
    """The files of the transport, and all tests in them."""
    paths = [
        path
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name.startswith(FILES)
    ]
    tests = [
        re.findall(r"^(?:async )?def (test_\w+)", p.read_text(), re.M) for p in paths
    ]
    return {path.stem for path in paths}.union(*tests)


@pytest.mark.parametrize("table", [ALWAYS, HOST.keys(), KERNELS])
def test_every_name_of_a_table_is_a_test_or_a_file(table: set[str]) -> None:
    assert set() == set(table) - _known()
