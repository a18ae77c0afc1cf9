"""How thorough tests are, and how several workers share them.

``--hypothesis-profile full``, the options of chaos, ``--numprocesses`` of pytest-xdist;
and what a test that counts may rely on.
"""

from __future__ import annotations

import gc
import secrets
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

settings.register_profile("full", max_examples=2000, deadline=None)


@pytest.fixture
def collected() -> None:
    """Let go of what earlier tests in this process held, memory and descriptors."""
    gc.collect()


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
        told: dict[str, int] = getattr(config, "workerinput", {})
        config.option.chaos_seed = told.get("seed", secrets.randbelow(1_000_000))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a worker the seed, which all of them need to find the same tests."""
    node.workerinput["seed"] = node.config.option.chaos_seed


class _ByFile(LoadScopeScheduling):
    """Give each worker whole files, but for two folders.

    The conformance suite is one worker's, because it holds a page against what all of
    its tests gave. Scenarios of chaos take long, and know nothing of each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if "tests/conformance/" in file:
            return "conformance"
        return nodeid if "tests/chaos/" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> LoadScopeScheduling:
    """Share the tests among workers, where there are several."""
    return _ByFile(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    return f"chaos: --chaos-seed {config.option.chaos_seed}"
