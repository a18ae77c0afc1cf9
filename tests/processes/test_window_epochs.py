"""Window: exposure and access epochs, closing, and what state it shows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes import ranks
from weightsync import Window
from weightsync.backend import create_shm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes.harness import Control, Processes


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    found = ranks.form(2)
    yield found
    ranks.end(found)


def _windows(groups: list[Any]) -> list[Window]:
    def create(group: Any) -> Window:
        return Window(group, Window.allocate(group, 16))

    return ranks.in_threads([lambda g=g: create(g) for g in groups])


def test_memory_cannot_be_read_while_it_is_exposed(groups: list[Any]) -> None:
    source, target = _windows(groups)
    target.expose()
    with pytest.raises(weightsync.EpochError, match=r"conceal\(\) it first"):
        target.local  # noqa: B018 -- the property raises
    source.put(torch.full((16,), 3, dtype=torch.uint8), 1).wait(5)
    target.wait_signal(0).wait(5)
    target.conceal()

    assert [3] * 16 == target.local.tolist()


def test_epochs_may_be_opened_again(groups: list[Any]) -> None:
    window = _windows(groups)[0]
    for _ in range(2):
        window.expose()
        window.expose()
        window.conceal()
        window.conceal()

        assert [0] * 16 == window.local.tolist()


def test_a_window_shows_its_state(groups: list[Any]) -> None:
    window, other = _windows(groups)

    assert "<Window rank 0 of 2, 16 bytes, readable>" == repr(window)
    window.expose()

    assert "<Window rank 0 of 2, 16 bytes, exposed>" == repr(window)
    ranks.in_threads([window.close, other.close])

    assert "<Window rank 0 of 2, 16 bytes, closed>" == repr(window)


def test_a_closed_window_refuses_everything(groups: list[Any]) -> None:
    window, other = _windows(groups)
    ranks.in_threads([window.close, other.close])
    window.close()
    one = torch.ones(1, dtype=torch.uint8)
    for use in (
        lambda: window.local,
        window.expose,
        window.conceal,
        lambda: window.put(one, 1),
        lambda: window.put_many([one], torch.zeros(0, 7, dtype=torch.int64), 1),
        lambda: window.signal(1),
        lambda: window.wait_signal(1),
        lambda: window.connect([1]),
    ):
        with pytest.raises(weightsync.ClosedError):
            use()
    again, _ = _windows(groups)

    assert [0] * 16 == again.local.tolist()


def test_closing_is_collective_and_bounded() -> None:
    groups = ranks.form(2, seconds=0.3)
    window = _windows(groups)[0]
    started = time.monotonic()
    with pytest.raises(weightsync.TimedOutError, match="rank 1 did not come"):
        window.close()

    assert 0.3 <= time.monotonic() - started < 2
    window.close()
    ranks.end(groups)


def test_a_window_may_be_closed_after_its_group_ended(groups: list[Any]) -> None:
    window, other = _windows(groups)
    groups[0].abort()
    with pytest.raises(weightsync.ClosedError):
        window.signal(1)
    window.close()
    with pytest.raises(weightsync.PeerError, match=r"rank 0 .* left the group"):
        other.signal(0)


def _dying(control: Control) -> None:
    group: Any = create_shm(None, enable_reconfigure=True)
    control.say(group.get_reconfigure_handle())
    ranks.reconfigure(group, 1, control.hear())
    window = Window(group, Window.allocate(group, 16))
    window.signal(0).wait()
    control.say("signalled")
    control.hear()


def test_what_a_peer_sent_before_it_died_counts_and_no_more(
    processes: Processes,
) -> None:
    (group,) = ranks.elastic(1)
    child = processes.start(_dying)
    handles = [group.get_reconfigure_handle(), child.hear()]
    child.say(handles)
    ranks.reconfigure(group, 1, handles)
    window = Window(group, Window.allocate(group, 16))
    child.hear()
    hopeless = window.wait_signals({1: 2})
    child.kill()
    with pytest.raises(weightsync.PeerError, match=f"process {child.pid}. died"):
        hopeless.wait(5)
    window.wait_signal(1).wait(5)
    with pytest.raises(weightsync.PeerError, match="died"):
        window.put(torch.ones(1, dtype=torch.uint8), 1).wait(5)
    started = time.monotonic()
    with pytest.raises(weightsync.PeerError, match="rank 1"):
        window.close()

    assert time.monotonic() - started < 1
    group.shutdown()
