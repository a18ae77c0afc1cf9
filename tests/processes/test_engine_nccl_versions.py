"""Engine "nccl" with every NCCL that it takes, and how it refuses 2.29."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.driven import MIB, SENTINEL, Held, Outcome, call
from weightsync import testing

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [testing.requires_emulator(), pytest.mark.timeout(60)]

MODES = ("staged", "swap", "inplace")
VERSIONS = ("2.30.7", "2.31.2", "2.32.3")
QUICK = {("2.31.2", "staged")}

LARGE = 80 * MIB
"""More than fits into one segment, so that there are several."""


@pytest.mark.parametrize(
    ("nccl", "mode"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in [(nccl, mode) for nccl in VERSIONS for mode in MODES]
    ],
)
def test_versions_arrive_in_every_mode_with_every_nccl(
    nccl: str, mode: str, pool: Pool
) -> None:
    pool.nccl, pool.numel = nccl, LARGE
    pool.train(count=1)
    pool.join("gen-0", mode=mode)
    for version in (1, 2, 3):
        pool.deliver(version, "gen-0")

    assert [] == pool.hangs
    assert pool.close() < 10


def test_nccl_2_29_says_that_it_wants_one_size_and_the_trainers_go_on(
    pool: Pool,
) -> None:
    pool.nccl = "2.29.7"
    pool.train(count=1)
    small = pool.start("small")
    assert "open" == small.hear()
    refused: Outcome = call(small, "receive", timeout=15)
    held = call(small, "held").value
    pushed = call(pool.trainers[0], "push", version=1, timeout=3)

    assert "PeerError" == refused.kind, refused
    assert "NCCL 2.29.7 wants memory of one size on all ranks" in refused.value
    assert Held(None, SENTINEL) == held
    assert "no replica has joined" in pushed.value
    assert [] == pool.hangs
    assert pool.close() < 10
