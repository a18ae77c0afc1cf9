"""The options of a group: our own, and those that torch has for its backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from weightsync import PlanError, UnsupportedError, testing
from weightsync.backend import NCCL, NcclOptions
from weightsync.nccl_options import choose_timeout, options_from

INTEGERS: Final = (
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "cta_policy",
    "split_share",
    "shrink_share",
    "traffic_class",
    "collnet_enable",
    "nvls_ctas",
    "n_channels_per_net_peer",
    "nvlink_centric_sched",
)
CONFIG: Final = {
    **{name: number for number, name in enumerate(INTEGERS, start=1)},
    "net_name": "Socket",
    "comm_name": "weights",
}
FIELDS: Final = {
    "_timeout": timedelta(seconds=7),
    "group_name": "a group",
    "global_ranks_in_group": [0, 2],
    "enable_reconfigure": True,
    "is_high_priority_stream": True,
    "blocking_wait": True,
    "library": "/some/libnccl.so",
    "group_desc": "for weights",
}


def of(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in FIELDS} | {
        name: getattr(options.config, name) for name in CONFIG
    }


def filled() -> NcclOptions:
    made = NcclOptions()
    for name, value in FIELDS.items():
        setattr(made, name, value)
    for name, value in CONFIG.items():
        setattr(made.config, name, value)
    return made


def test_options_begin_with_nothing_set() -> None:
    found = of(NcclOptions())

    assert timedelta(minutes=30) == found["_timeout"]
    assert {None, "", False} >= {found[name] for name in (*CONFIG, "library")}


def test_a_clone_has_everything_and_is_another_one() -> None:
    original = filled()
    clone = original.clone()
    clone.config.min_ctas = 99
    clone.library = ""

    assert FIELDS | CONFIG == of(original)
    assert FIELDS | CONFIG | {"min_ctas": 99, "library": ""} == of(clone)


def test_torch_waits_on_the_host_if_its_variable_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")

    assert NcclOptions().blocking_wait


def torchs() -> Any:
    return dist.ProcessGroupNCCL.Options()


def test_the_options_of_torch_are_taken_over() -> None:
    given = torchs()
    given.is_high_priority_stream = True
    given.group_name = "a group"
    given._timeout = timedelta(seconds=7)
    given.config.blocking = 1
    given.config.min_ctas = 2
    given.config.max_ctas = 8
    given.config.cga_cluster_size = 0
    given.config.net_name = "Socket"
    made = options_from(given, NcclOptions)

    assert made.is_high_priority_stream
    assert "a group" == made.group_name
    assert timedelta(seconds=7) == made._timeout
    assert [2, 8, 0] == [
        made.config.min_ctas,
        made.config.max_ctas,
        made.config.cga_cluster_size,
    ]
    assert made.config.split_share is None
    assert "Socket" == made.config.net_name


def test_what_has_no_meaning_in_the_options_of_torch_is_an_error() -> None:
    nonblocking, newer = torchs(), torchs()
    nonblocking.config.blocking = 0
    newer.config.max_p2p_peers = 3

    with pytest.raises(UnsupportedError, match=r"config\.blocking is 0.*are blocking"):
        options_from(nonblocking, NcclOptions)
    with pytest.raises(UnsupportedError, match=r"config\.max_p2p_peers is 3"):
        options_from(newer, NcclOptions)


def test_anything_else_is_no_options() -> None:
    with pytest.raises(PlanError, match="found a dict"):
        options_from({"timeout": 1}, NcclOptions)


HALF_HOUR: Final = timedelta(minutes=30)
TEN: Final = timedelta(minutes=10)
SHORT: Final = timedelta(seconds=5)


@pytest.mark.parametrize(
    ("asked", "optional", "expected"),
    [
        (HALF_HOUR, HALF_HOUR, HALF_HOUR),
        (HALF_HOUR, SHORT, SHORT),
        (SHORT, HALF_HOUR, SHORT),
        (SHORT, TEN, SHORT),
        (TEN, SHORT, SHORT),
        (SHORT, SHORT, SHORT),
    ],
)
def test_a_timeout_that_was_given_is_taken(
    asked: timedelta, optional: timedelta, expected: timedelta
) -> None:
    assert expected == choose_timeout(asked, optional)


def test_two_timeouts_that_differ_are_an_error() -> None:
    with pytest.raises(PlanError, match="5 s by its call, 6 s by its options"):
        choose_timeout(SHORT, timedelta(seconds=6))


def uses(own: bool) -> list[Any]:
    given: Any = NcclOptions() if own else torchs()
    given._timeout = SHORT
    given.config.comm_name = "mine"
    torch.cuda.set_device(0)
    dist.init_process_group(
        NCCL, store=dist.HashStore(), rank=0, world_size=1, pg_options=given
    )
    group: Any = dist.group.WORLD
    number = torch.tensor([3]).cuda()
    dist.all_reduce(number)
    found = group._get_backend(torch.device("cuda")).options
    return [
        type(found).__name__,
        found._timeout == SHORT,
        found.config.comm_name,
        found.group_name == group.group_name,
        given.group_name,
        number.tolist(),
    ]


@testing.requires_emulator()
@pytest.mark.parametrize("own", [True, False])
def test_a_group_has_the_options_that_it_was_given(own: bool) -> None:
    found = testing.emulated(uses, 1, args=[own])

    assert [["NcclOptions", True, "mine", True, "", [3]]] == found
