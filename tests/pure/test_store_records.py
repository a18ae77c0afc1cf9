"""Counters that are only looked at, and addresses that are taken out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from weightsync.errors import ProtocolError
from weightsync.store import Rendezvous

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["hash", "file"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path) -> Rendezvous:
    if request.param == "hash":
        return Rendezvous(dist.HashStore(), "weightsync/job")
    return Rendezvous(dist.FileStore(str(tmp_path / "store"), -1), "weightsync/job")


def test_a_counter_can_be_read_without_counting(rendezvous: Rendezvous) -> None:
    seen = [rendezvous.counted("term"), rendezvous.counted("term")]
    counted = [rendezvous.count("term") for _ in range(11)]
    seen += [rendezvous.counted("term"), rendezvous.counted("term")]

    assert list(range(1, 12)) == counted
    assert [0, 0, 11, 11] == seen


@pytest.mark.parametrize("message", [{"a": 1}, 5, 2**60])
def test_a_counter_that_is_none_is_an_error_that_names_the_key(
    rendezvous: Rendezvous, message: object
) -> None:
    rendezvous.publish("term", message)
    with pytest.raises(ProtocolError, match="'weightsync/job/term'"):
        rendezvous.counted("term")


def test_an_address_is_taken_out_by_its_owner_only(rendezvous: Rendezvous) -> None:
    rendezvous.retract("leader", "mine")
    rendezvous.publish("leader", "another's")
    rendezvous.retract("leader", "mine")
    kept = rendezvous.find("leader", str)
    rendezvous.retract("leader", "another's")

    assert "another's" == kept
    assert None is rendezvous.find("leader", str)
