"""Generators outlive their trainers: they join again, and versions continue."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Literal

import pytest

from tests.processes.driven import ask, call, close
from tests.processes.returning import (
    MODES,
    Seen,
    assert_flat,
    call_all,
    deliver,
    kinds,
    start_generators,
    start_trainers,
    values,
)

if TYPE_CHECKING:
    from tests.processes.harness import Child, Processes
    from tests.processes.rig import Mode

pytestmark = pytest.mark.usefixtures("engine")

NUMEL = 1 << 20
MUCH = 64 << 20

Way = Literal["close", "kill", "kill rank 0", "kill rank 1"]
WAYS: tuple[Way, ...] = ("close", "kill", "kill rank 0", "kill rank 1", "close")


def end(trainers: list[Child], generators: list[Child], way: Way) -> set[str]:
    """End the trainers in this way; return what the generators were told, once."""
    if way == "close":
        close(*trainers)
    else:
        struck = trainers if way == "kill" else [trainers[int(way[-1])]]
        for trainer in struck:
            trainer.kill(signal.SIGKILL)
            trainer.join()
    told = kinds(call_all(generators, "receive", timeout=10))
    if way in {"kill rank 0", "kill rank 1"}:
        close(trainers[1 - int(way[-1])])
    return told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_generators_outlive_five_sets_of_trainers(
    processes: Processes, address: str, mode: Mode, ranks: int
) -> None:
    generators = start_generators(processes, address, NUMEL, mode, ranks=ranks)
    trainers = start_trainers(processes, address, NUMEL)
    assert ["open"] * ranks == [rank.hear() for rank in generators]
    delivered = [deliver(trainers, generators, value=1)]
    told, seen, counted = [], [], []
    for number, way in enumerate(WAYS):
        told.append(end(trainers, generators, way))
        trainers = start_trainers(processes, address, NUMEL)
        delivered.append(deliver(trainers, generators, value=number + 2))
        seen += values(call_all(generators, "see"))
        counted.append(values(call_all(generators, "count")))
    close(*generators, *trainers)

    dead = {"PeerError"}
    assert [{"ClosedError"}, dead, dead, dead, {"ClosedError"}] == told
    assert [[(0, version)] * ranks for version in range(1, 7)] == delivered
    expected = [Seen(version, 0, version) for version in range(2, 7)]
    assert [each for each in expected for _ in range(ranks)] == seen
    assert_flat(counted)


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_trainer_is_succeeded(
    processes: Processes, address: str, mode: Mode
) -> None:
    generators = start_generators(processes, address, NUMEL, mode)
    trainers = start_trainers(processes, address, NUMEL)
    generators[0].hear()
    delivered = deliver(trainers, generators, value=7)
    told = end(trainers, generators, "kill")
    early = call_all(generators, "receive", timeout=0.5)
    kept = values(call_all(generators, "see"))
    trainers = start_trainers(processes, address, NUMEL)
    delivered += deliver(trainers, generators, value=8)
    seen = values(call_all(generators, "see"))
    close(*generators, *trainers)

    assert {"PeerError"} == told
    assert ["TimedOutError"] == [outcome.kind for outcome in early]
    assert "did not join again within 0.5 s" in early[0].value
    assert 0.5 <= early[0].seconds < 1.5
    assert [(0, 1), (0, 2)] == delivered
    assert [Seen(1, 0, 7), Seen(2, 0, 8)] == kept + seen


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_a_push_whose_trainer_is_killed_half_way_changes_nothing_and_others_go_on(
    processes: Processes, address: str, mode: Mode
) -> None:
    generators = start_generators(processes, address, MUCH, mode)
    trainers = start_trainers(processes, address, MUCH)
    generators[0].hear()
    deliver(trainers, generators, value=30, version=30)
    kill = {"pids": [trainers[0].pid], "number": signal.SIGKILL}
    call(generators[0], "strike_at_first_byte", value=31, **kill)
    ask(generators[0], "receive", timeout=20)
    for trainer in trainers:
        ask(trainer, "push", value=31, version=31, timeout=20)
    told = generators[0].hear()
    if told.kind == "ok":  # all was put before it died
        told = call(generators[0], "receive", timeout=20)
    kept = values(call_all(generators, "see"))[0]
    pushed = trainers[1].hear()
    close(trainers[1])
    trainers = start_trainers(processes, address, MUCH)
    delivered = deliver(trainers, generators, value=33, version=33)
    seen = values(call_all(generators, "see"))
    close(*generators, *trainers)

    assert ("PeerError", "PeerError") == (told.kind, pushed.kind)
    assert told.seconds < 5.0
    assert kept in {Seen(30, 0, 30), Seen(31, 0, 31)}
    assert [(0, 33)] == delivered
    assert [Seen(33, 0, 33)] == seen
