"""How thorough tests are: ``--hypothesis-profile full``, and the options of chaos."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

settings.register_profile("full", max_examples=2000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "random scenarios of tests/chaos")
    group.addoption(
        "--chaos-seed",
        type=int,
        help="the seed of the first scenario; the others follow; random by default",
    )
    group.addoption(
        "--chaos-scenarios", type=int, help="how many on each engine; few unless slow"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.chaos_seed is None:
        config.option.chaos_seed = secrets.randbelow(1_000_000)


def pytest_report_header(config: pytest.Config) -> str:
    return f"chaos: --chaos-seed {config.option.chaos_seed}"
