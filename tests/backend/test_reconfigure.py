"""Groups that are formed anew again and again, while members come, go and die."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.endings import in_turn, meeting
from tests.conformance.group import rank, world
from tests.conformance.members import (
    begin,
    exchanged,
    expected,
    form,
    forming,
    handles_of,
    leave_together,
)
from tests.conformance.windows import board, numbers, raised
from tests.processes.driven import census, in_shared_memory, resident_mib
from weightsync import testing
from weightsync.errors import ClosedError

BACKEND: Final = "weightsync-nccl2"

SHORT: Final = timedelta(seconds=1)
LONG: Final = timedelta(seconds=20)

pytestmark = testing.requires_emulator()


# A long life

# How many more descriptors, threads, mappings and MiB may be held later: memory that is
# freed need not be unmapped, and the flight recorder fills. And for each that dies in a
# meeting: if it does so when it has the id and has not come to NCCL, nothing makes NCCL
# give up waiting for it.
SLACK: Final = (0, 0, 10, 32)
SLACK_OF_A_DEATH: Final = (3, 1, 10, 8)


@dataclass(frozen=True, slots=True)
class Round:
    """What happens in one of many generations."""

    members: list[int]
    victim: int | None = None
    dies: str = ""
    """Whether the victim is "absent", or dies in the "meeting" or in a "collective"."""


def rounds_of(seed: int, count: int, processes: int, kills: int) -> list[Round]:
    """Make up a life, the same in every process. Process 0 survives it."""
    chance = random.Random(seed)  # Not for secrets: to be repeated.
    alive = list(range(processes))
    fatal = set(chance.sample(range(1, count), kills))
    found = []
    for number in range(count):
        members = chance.sample(alive, min(len(alive), chance.randint(2, 6)))
        others = [each for each in members if each]
        if number in fatal and others:
            victim = chance.choice(others)
            dies = chance.choice(["absent", "meeting", "collective"])
            found.append(Round(members, victim, dies))
            alive.remove(victim)
        else:
            found.append(Round(members))
    return found


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Life:
    """One process of many, and the group that it forms with others."""

    def __init__(self, store: dist.Store, device: torch.device) -> None:
        self.store = store
        self.device = device
        self.number = 0

    def handles(self, members: list[int]) -> list[str]:
        """Publish the own handle for the next attempt, and return all of them."""
        self.number += 1
        mine = dist._get_reconfigure_handle()
        self.store.set(f"{self.number}/{rank()}", mine)
        return [self.store.get(f"{self.number}/{each}").decode() for each in members]

    def tries(self, members: list[int], timeout: timedelta) -> str:
        """Form the group of these, this being one of them; return what went wrong."""
        handles = self.handles(members)
        return raised(dist._reconfigure, self.number, handles, None, timeout)

    def lives(self, round_: Round) -> Any:
        """Take part in a round, and return what came of it."""
        if rank() not in round_.members:
            self.number += 1 if round_.dies != "absent" else 2
            return None
        if round_.victim is None:
            assert not self.tries(round_.members, LONG)
            return exchanged(self.device)
        return getattr(self, f"loses_one_{round_.dies}")(round_)

    def loses_one_absent(self, round_: Round) -> Any:
        """One publishes its handle and dies: the others form a group without it."""
        if rank() == round_.victim:
            self.handles(round_.members)
            die()
        assert self.tries(round_.members, SHORT)
        rest = [each for each in round_.members if each != round_.victim]
        assert not self.tries(rest, LONG)
        return exchanged(self.device)

    def loses_one_meeting(self, round_: Round) -> Any:
        """One dies while they meet: whether they form a group is a matter of luck."""
        handles = self.handles(round_.members)
        if rank() == round_.victim:
            threading.Timer(random.Random(self.number).random() / 50, die).start()
        raised(dist._reconfigure, self.number, handles, None, SHORT)
        if rank() == round_.victim:
            die()
        return None

    def loses_one_collective(self, round_: Round) -> Any:
        """One dies while the others wait for it."""
        assert not self.tries(round_.members, LONG)
        if rank() == round_.victim:
            die()
        number = numbers(0, 1).to(self.device)
        work: Any = dist.all_reduce(number, async_op=True)
        return bool(raised(work.wait, timedelta(milliseconds=100)))

    def alone(self) -> list[int]:
        """Form a group of this process alone, and return what it has open then."""
        mine = dist._get_reconfigure_handle()
        self.number += 1
        dist._reconfigure(10**6 * (1 + rank()) + self.number, [mine]).wait()
        exchanged(self.device)
        return open_now()


def open_now() -> list[int]:
    """Return how many descriptors, threads, mappings and MiB this process holds."""
    found = census()
    memory = round(resident_mib())
    return [found.descriptors, found.threads, found.mappings, memory]


def exceeded(early: list[int], late: list[int], deaths: int) -> bool:
    most = [
        before + more + deaths * stuck
        for before, more, stuck in zip(early, SLACK, SLACK_OF_A_DEATH, strict=True)
    ]
    return any(after > each for after, each in zip(late, most, strict=True))


def deaths_in_meetings(plan: list[Round]) -> int:
    return sum(each.dies == "meeting" for each in plan)


def outlives(seed: int, count: int, kills: int, private: bool) -> Any:
    store = meeting()
    place: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not private:
        place = in_turn(store, 0)
    life = Life(store, begin(BACKEND, timeout=LONG, **place))
    plan = rounds_of(seed, count, world(), kills)
    warm, early = plan[: count // 4], []
    found = []
    for number, round_ in enumerate(plan):
        if number == len(warm):
            early = life.alone()
        found.append(life.lives(round_))
    late = life.alone()
    # A store closes a connection of another process some time after that one did.
    until = time.monotonic() + 5
    while exceeded(early, late, 0) and time.monotonic() < until:
        time.sleep(0.05)
        late = open_now()
    survivors = world() - sum(each.victim is not None for each in plan)
    leave_together(survivors, dist.PrefixStore("end/", store))
    dist.distributed_c10d._abort_process_group()
    return [found, early, late]


def promised(round_: Round, process: int) -> Any:
    """Return what a round is to a process that survives it."""
    if process not in round_.members or round_.dies == "meeting":
        return None
    if round_.dies == "collective":
        return True
    lost = round_.victim
    return expected([each for each in round_.members if each != lost], process)


@pytest.mark.parametrize("private", [False, True], ids=["one store", "own stores"])
@pytest.mark.parametrize(
    ("count", "kills"),
    [
        (20, 3),
        pytest.param(500, 6, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_survivors_form_groups_whoever_comes_and_dies_and_nothing_is_left(
    count: int, kills: int, private: bool
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # To be repeated.
    processes = 6 + kills // 2
    plan = rounds_of(seed, count, processes, kills)
    dead = {each.victim for each in plan} - {None}
    shared = in_shared_memory()

    found = testing.outcomes(
        *(outlives, processes),
        args=[seed, count, kills, private],
        timeout=50 + count,
        hang_seconds=0,
    )

    for process, outcome in enumerate(found):
        if process in dead:
            assert -signal.SIGKILL == outcome.exit_code
            continue
        assert outcome.ok, outcome.describe()
        rounds, early, late = outcome.result
        assert [promised(each, process) for each in plan] == rounds
        print(f"process {process}: {early} early, {late} late")
        assert not exceeded(early, late, deaths_in_meetings(plan)), (early, late)
    assert set() == in_shared_memory() - shared


# What is left of a generation


def keeps_the_last_generation() -> list[Any]:
    with forming(BACKEND) as device:
        form(0, [0, 1])
        exchanged(device)
        done: Any = dist.all_reduce(numbers(0, 1).to(device), async_op=True)
        done.wait()
        torch.cuda.synchronize()
        pending: Any = None
        if rank() == 0:
            pending = dist.all_reduce(numbers(0, 1).to(device), async_op=True)
        form(1, [1, 0])
        found: list[Any] = [exchanged(device), bool(done.wait())]
        if pending is not None:
            found.append(closed(pending.wait))
        leave_together(2)
        return found


def closed(call: Any) -> bool:
    with pytest.raises(ClosedError):
        call()
    return True


def test_pending_work_of_the_last_generation_is_closed_and_finished_work_is_not() -> (
    None
):
    found = testing.emulated(keeps_the_last_generation, 2)

    assert [expected([1, 0], 0), True, True] == found[0]
    assert [expected([1, 0], 1), True] == found[1]


def tries_too_often() -> list[Any]:
    with forming(BACKEND) as device:
        form(0, [0, 1])
        error = raised(dist._reconfigure, 1, handles_of(1, [1, 0]), None, LONG)
        between = exchanged(device)
        form(2, [1, 0])
        found = exchanged(device)
        leave_together(2)
        return ["uuid 1 was used before" in error, between, found]


def test_a_used_uuid_is_an_error_in_every_rank_and_the_group_stays() -> None:
    found = testing.emulated(tries_too_often, 2)

    assert [
        [True, expected([0, 1], process), expected([1, 0], process)]
        for process in range(2)
    ] == found


def waits_in_vain() -> list[Any]:
    with forming(BACKEND) as device:
        form(0, [0, 1])
        handles = handles_of(1, [0, 1])
        error = ""
        if rank() == 1:
            error = raised(dist._reconfigure, 7, handles, None, SHORT)
            board().set("in vain", "")
        board().wait(["in vain"])
        # Who comes too late hears that it is over, and need not wait.
        began = time.monotonic()
        if rank() == 0:
            error = raised(dist._reconfigure, 7, handles, None, LONG)
        took = time.monotonic() - began
        found = exchanged(device)
        leave_together(2)
        return [bool(error), took < 10, found]


def test_an_attempt_that_is_called_off_leaves_the_group_as_it_was() -> None:
    found = testing.emulated(waits_in_vain, 2)

    assert [[True, True, expected([0, 1], process)] for process in range(2)] == found


def ends_while_it_meets() -> list[Any]:
    store = meeting()
    begin(BACKEND, **in_turn(store, 0))
    group: Any = dist.group.WORLD
    life = Life(store, torch.device("cuda", rank()))
    handles = life.handles([0, 1])
    found: list[Any] = []
    if rank() == 1:
        thread = threading.Timer(0.3, group.abort)
        thread.start()
        began = time.monotonic()
        found.append("aborted" in raised(dist._reconfigure, 1, handles, None, LONG))
        found.append(time.monotonic() - began < 10)
        thread.join()
    leave_together(2, dist.PrefixStore("end/", store))
    return found


def test_an_abort_ends_a_meeting() -> None:
    assert [[], [True, True]] == testing.emulated(ends_while_it_meets, 2)


# Members without a store in common


def joins_another_job() -> list[Any]:
    """Two trainers and two generators, which have no group in common."""
    trains, place = rank() < 2, rank() % 2
    store = dist.PrefixStore("trainers" if trains else "generators", meeting())
    device = begin(
        BACKEND, store=store, rank=place, world_size=2, enable_reconfigure=False
    )
    found = [dist.get_rank(), dist.get_world_size()]
    bridge = weightsync_group()
    mine = bridge.get_reconfigure_handle()
    shared = meeting_point(store)
    shared.set(f"bridge/{rank()}", mine)
    opts = dist.distributed_c10d.ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [shared.get(f"bridge/{each}").decode() for each in range(4)]
    bridge.reconfigure(opts).wait()
    total = numbers(rank(), 1).to(device)
    bridge.allreduce([total]).wait()
    part = numbers(rank(), 1).to(device)
    dist.all_reduce(part)
    found += [bridge.rank(), bridge.size(), *total.tolist(), *part.tolist()]
    leave_together(4, dist.PrefixStore("end/", shared))
    bridge.shutdown()
    dist.destroy_process_group()
    return found


def weightsync_group() -> Any:
    """Return a group of this process alone, that may be formed with others."""
    from weightsync import backend

    return backend.create_nccl(dist.HashStore(), enable_reconfigure=True)


def meeting_point(store: Any) -> dist.Store:
    """Return the store behind the prefix."""
    return store.underlying_store


def test_trainers_and_generators_of_different_jobs_form_a_group() -> None:
    found = testing.emulated(joins_another_job, 4)

    assert [
        [process % 2, 2, process, 4, 6, 1 if process < 2 else 5] for process in range(4)
    ] == found


# Once all have agreed


def loses_one_at_the_last_moment() -> list[Any]:
    with forming(BACKEND) as device:
        handles = handles_of(0, [0, 1, 2])
        began = time.monotonic()
        error = raised(dist._reconfigure, 1, handles, None, SHORT)
        took = time.monotonic() - began
        unformed = raised(dist.all_reduce, numbers(0, 1).to(device))
        form(1, [1, 0])
        found = exchanged(device)
        leave_together(2)
        return [bool(error), took < 15, "not formed" in unformed, found]


@pytest.mark.parametrize("fault", ["kill", "stall"])
def test_a_group_is_formed_after_one_was_lost_while_it_was_made(fault: str) -> None:
    *rest, lost = testing.outcomes(
        loses_one_at_the_last_moment, 3, faults=f"init@rank=2:{fault}", timeout=30
    )

    assert not lost.ok
    assert [[True] * 3 + [expected([1, 0], process)] for process in range(2)] == [
        each.result for each in rest
    ]
