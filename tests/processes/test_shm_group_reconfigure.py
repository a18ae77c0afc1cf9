"""Reconfigure: ranks by list or set, uuids, generations, failures, survivors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes import ranks
from weightsync.backend import create_shm

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

ONE = torch.ones(1, dtype=torch.uint8)


def _can_signal_each_other(groups: list[Any]) -> None:
    windows = [window for window, _ in ranks.windows(groups, 4)]
    for window in windows:
        for peer in range(len(groups)):
            window.put(ONE, peer, 0, False)
    for window in windows:
        for peer in range(len(groups)):
            window.wait_signal(peer, False, ranks.wait_options(5))


def test_a_list_gives_ranks_by_position() -> None:
    groups = ranks.elastic(3)
    chosen = [groups[2], groups[0], groups[1]]
    ranks.reform(chosen, 1)

    assert [(0, 3), (1, 3), (2, 3)] == [(g.rank(), g.size()) for g in chosen]
    _can_signal_each_other(chosen)
    ranks.end(groups)


def test_a_set_lets_the_backend_choose_the_same_ranks_everywhere() -> None:
    groups = ranks.elastic(3)
    handles = {group.get_reconfigure_handle() for group in groups}
    ranks.in_threads([lambda g=g: ranks.reconfigure(g, 1, handles) for g in groups])

    assert [0, 1, 2] == sorted(group.rank() for group in groups)
    _can_signal_each_other(sorted(groups, key=lambda group: group.rank()))
    ranks.end(groups)


def test_a_group_shrinks_and_grows_and_keeps_nothing_of_the_old_one() -> None:
    groups = ranks.elastic(3)
    ranks.reform(groups, 1)
    (old, memory), (other, _), _ = ranks.windows(groups, 4)
    other.signal(0, False)  # never taken: must not count in the next generation
    ranks.reform(groups[:2], 2)

    assert [2, 2] == [group.size() for group in groups[:2]]
    for use in (
        lambda: old.put(ONE, 1, 0, False),
        lambda: old.signal(1, False),
        lambda: old.wait_signal(1, False, ranks.wait_options(5)),
    ):
        with pytest.raises(weightsync.ClosedError, match="reconfigured"):
            use()
    assert [0] * 4 == memory.tolist()  # what the user holds stays readable
    window, _ = ranks.windows(groups[:2], 4)[0]

    assert 0 == window.available_signals(1)
    ranks.reform([*groups[:2], *ranks.elastic(1)], 3)

    assert [3, 3] == [group.size() for group in groups[:2]]
    ranks.end(groups)


def test_a_member_that_was_left_out_finds_its_peers_gone() -> None:
    groups = ranks.elastic(3)
    ranks.reform(groups, 1)
    window = ranks.windows(groups, 4)[2][0]
    ranks.reform(groups[:2], 2)
    with pytest.raises(weightsync.PeerError, match=r"rank 0 .* left the group"):
        window.put(ONE, 0, 0, False)
    ranks.end(groups)


def test_a_used_uuid_is_refused() -> None:
    groups = ranks.elastic(2)
    ranks.reform(groups, 7)
    handles = [group.get_reconfigure_handle() for group in groups]
    for group in groups:
        with pytest.raises(weightsync.PlanError, match="uuid 7 was used before"):
            ranks.reconfigure(group, 7, handles)
    _can_signal_each_other(groups)  # and the group is as it was
    ranks.end(groups)


def test_lists_that_do_not_match_are_an_error_on_both() -> None:
    groups = ranks.elastic(2)
    handles = [group.get_reconfigure_handle() for group in groups]
    started = time.monotonic()
    found = ranks.outcomes(
        [
            lambda: ranks.reconfigure(groups[0], 1, handles, 2),
            lambda: ranks.reconfigure(groups[1], 1, handles[::-1], 2),
        ]
    )

    assert time.monotonic() - started < 5
    for error in found:
        assert isinstance(error, weightsync.WeightSyncError), found
    ranks.reform(groups, 2)
    _can_signal_each_other(groups)
    ranks.end(groups)


def test_different_uuids_are_an_error_on_both() -> None:
    groups = ranks.elastic(2)
    handles = [group.get_reconfigure_handle() for group in groups]
    found = ranks.outcomes(
        [
            lambda: ranks.reconfigure(groups[0], 1, handles, 2),
            lambda: ranks.reconfigure(groups[1], 2, handles, 2),
        ]
    )

    for error in found:
        assert isinstance(error, weightsync.WeightSyncError), found
    ranks.reform(groups, 3)
    _can_signal_each_other(groups)
    ranks.end(groups)


def test_a_failed_attempt_is_followed_by_a_successful_one() -> None:
    groups = ranks.elastic(2)
    handles = [group.get_reconfigure_handle() for group in groups]
    started = time.monotonic()
    with pytest.raises(weightsync.TimedOutError, match="rank 1 did not come"):
        ranks.reconfigure(groups[0], 1, handles, 0.3)

    assert time.monotonic() - started < 2
    with pytest.raises(weightsync.ClosedError, match="not formed"):
        groups[0].barrier().wait()
    assert handles[0] != groups[0].get_reconfigure_handle()
    ranks.reform(groups, 2)
    _can_signal_each_other(groups)
    ranks.end(groups)


@pytest.mark.parametrize(
    "handle",
    ["", "nonsense", "shm:1:2", "shm:999999999:3:4", "shm:1:0:1", "shm:-1:-1:0"],
)
def test_a_handle_that_leads_nowhere_is_an_error(handle: str) -> None:
    (group,) = ranks.elastic(1)
    mine = group.get_reconfigure_handle()
    started = time.monotonic()
    with pytest.raises(weightsync.WeightSyncError):
        ranks.reconfigure(group, 1, [mine, handle], 2)
    with pytest.raises(weightsync.PlanError, match="handle of this rank"):
        ranks.reconfigure(group, 2, [handle], 2)

    assert time.monotonic() - started < 5
    ranks.reform([group], 3)

    assert (0, 1) == (group.rank(), group.size())
    group.shutdown()


def _member(control: Control) -> None:
    group: Any = create_shm(None, enable_reconfigure=True)
    window: Any = None
    while (said := control.hear()) is not None:
        if said == "handle":
            control.say(group.get_reconfigure_handle())
        elif said == "wait":
            try:
                window.wait_signal(2, False, ranks.wait_options(20))
            except weightsync.PeerError as error:
                control.say(str(error))
        else:
            uuid, handles = said
            ranks.reconfigure(group, uuid, handles)
            window, memory = ranks.windows([group], 4)[0]
            for peer in range(group.size()):
                window.put(torch.full((1,), uuid, dtype=torch.uint8), peer, 0, False)
            for peer in range(group.size()):
                window.wait_signal(peer, False, ranks.wait_options(5))
            control.say((group.rank(), group.size(), int(memory[0])))


def test_survivors_of_a_kill_shrink_twice(processes: Processes) -> None:
    members = [processes.start(_member) for _ in range(4)]

    def reform(uuid: int, chosen: list[Any]) -> None:
        for member in chosen:
            member.say("handle")
        handles = [member.hear() for member in chosen]
        for member in chosen:
            member.say((uuid, handles))
        size = len(chosen)

        assert [(rank, size, uuid) for rank in range(size)] == [
            member.hear() for member in chosen
        ]

    reform(1, members)
    for member in members[:2]:
        member.say("wait")
    members[2].kill()
    started = time.monotonic()
    for member in members[:2]:
        assert f"rank 2 (process {members[2].pid}) died" in member.hear()
    assert time.monotonic() - started < 2
    reform(2, [members[0], members[1], members[3]])
    members[0].kill()
    reform(3, [members[3], members[1]])
    for member in (members[1], members[3]):
        member.say(None)
        member.result()
