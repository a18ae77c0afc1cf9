"""``weightsync.testing``: ranks as processes, their results, their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weightsync import testing
from weightsync.errors import PlanError
from weightsync.testing import RanksFailedError

# A nursery imports torch, and may share a core with whatever else is tested.
pytestmark = pytest.mark.timeout(120)

# What ranks do. They find these functions in this file.


def rank() -> int:
    return int(os.environ["RANK"])


def square(offset: int) -> int:
    return rank() ** 2 + offset


def give_back(*values: Any) -> Any:
    return values


def variables(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def nursery() -> int:
    return os.getppid()


def where() -> list[str]:
    return [str(Path.cwd()), *sys.path]


def fail_in_rank_1() -> None:
    print("rank", rank(), "is here")
    if rank() == 1:
        raise ValueError("rank 1 has no luck")


def end_with(codes: list[int]) -> str:
    code = codes[rank()]
    if code < 0:
        os.kill(os.getpid(), -code)
    if code > 0:
        sys.exit(code)
    return "well"


def sleep_in_rank_0(seconds: float) -> str:
    if rank() == 0:
        time.sleep(seconds)
    return "awake"


def wait_or_exit() -> None:
    if rank() == 1:
        sys.exit(3)
    time.sleep(100)


def die_or_wait() -> str:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return "survived"


def leave_a_child_behind() -> int:
    child = subprocess.Popen(["sleep", "100"])
    child.returncode = 0  # Nobody warns that it still runs.
    return child.pid


def return_an_object() -> object:
    return object()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def gather_ranks() -> list[int]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank())
    dist.init_process_group("nccl")
    mine = torch.tensor([rank()]).cuda()
    gathered = torch.empty(dist.get_world_size(), dtype=mine.dtype).cuda()
    for _ in range(3):
        dist.all_gather_into_tensor(gathered, mine)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return gathered.tolist()


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, if it has not yet."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


# Results


def test_results_come_by_rank() -> None:
    assert testing.emulated(square, 3, args=[10]) == [10, 11, 14]


def test_values_travel_unchanged() -> None:
    values = [1 << 40, 0.1, "text", b"\0\xff", None, True, {"a": [1, 2]}, float("inf")]

    assert [values] == testing.emulated(give_back, 1, args=values)


def test_a_function_may_be_named() -> None:
    assert testing.emulated("operator:add", 2, args=[1, 2]) == [3, 3]


def test_ranks_find_what_torch_wants() -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    found = testing.emulated(variables, 2, args=[names])

    assert found == [
        dict(zip(names, [str(rank), str(rank), "2", "2", "127.0.0.1"], strict=True))
        for rank in range(2)
    ]


def test_all_ranks_of_a_call_have_one_port() -> None:
    found = testing.emulated(variables, 2, args=[["MASTER_PORT"]])

    assert found[0] == found[1]
    assert 0 < int(found[0]["MASTER_PORT"]) < 65536


def test_options_reach_the_ranks() -> None:
    names = [
        "WEIGHTSYNC_EMULATOR_GPUS",
        "WEIGHTSYNC_EMULATOR_FAULTS",
        "WEIGHTSYNC_EMULATOR_HANG_SECONDS",
        "WEIGHTSYNC_EMULATOR_NCCL",
    ]
    found = testing.emulated(
        *(variables, 1),
        args=[names],
        gpus=2,
        faults="put:stall",
        nccl="2.31.2",
        timeout=50,
    )

    assert list(found[0].values()) == ["2", "put:stall", "25", "2.31.2"]


def test_sixteen_ranks_have_sixteen_gpus() -> None:
    assert testing.emulated(count_gpus, 16) == [16] * 16


def test_ranks_see_the_environment_and_folder_of_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TEST_OF_TESTING", "set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere/of/testing")
    found = testing.emulated(variables, 1, args=[["WEIGHTSYNC_TEST_OF_TESTING"]])
    folder, *path = testing.emulated(where, 1)[0]

    assert found == [{"WEIGHTSYNC_TEST_OF_TESTING": "set"}]
    assert folder == str(tmp_path)
    assert "/nowhere/of/testing" in path


def test_calls_share_one_nursery() -> None:
    first = testing.emulated(nursery, 1)
    second = testing.emulated(nursery, 2, gpus=4, faults="put:stall")

    assert first * 2 == second


def test_another_environment_gets_another_nursery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = testing.emulated(nursery, 1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    second = testing.emulated(nursery, 1)

    assert first != second
    assert is_gone(first[0])


@pytest.mark.parametrize("function", [lambda: 1, "nothing", ":name", "module:", 5])
def test_what_another_process_cannot_find_is_refused(function: Any) -> None:
    with pytest.raises(PlanError):
        testing.emulated(function, 1)


@pytest.mark.parametrize("ranks", [0, 65])
def test_an_impossible_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(PlanError, match=rf"ranks is {ranks}, but must be from 1 to 64"):
        testing.emulated(square, ranks, args=[0])


# Failures


def test_a_failure_shows_what_every_rank_wrote() -> None:
    with pytest.raises(RanksFailedError) as raised:
        testing.emulated(fail_in_rank_1, 2)
    message = str(raised.value)

    assert "test_testing:fail_in_rank_1 on the emulator: 1 of 2 ranks failed" in message
    assert "rank 0 ended with exit code 0" in message
    assert "rank 1 ended with exit code 1" in message
    assert "rank 0 is here" in message
    assert "ValueError: rank 1 has no luck" in message
    assert [0, 1] == [each.exit_code for each in raised.value.outcomes]


def test_other_ranks_are_not_waited_for_long() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1 ended with exit code 3") as (
        raised
    ):
        testing.emulated(wait_or_exit, 2)

    assert time.monotonic() - began < 20
    assert raised.value.outcomes[0].late


def test_a_rank_that_takes_too_long_is_killed_and_says_where_it_was() -> None:
    with pytest.raises(RanksFailedError) as raised:
        testing.emulated(sleep_in_rank_0, 2, args=[100], timeout=5)
    first, second = raised.value.outcomes

    assert first.late
    assert "in sleep_in_rank_0" in first.output
    assert "rank 0 was still running when the time was over" in str(raised.value)
    assert second.ok
    assert second.result == "awake"


def test_a_diagnosed_hang_is_named() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 hung, which the emulator") as (
        raised
    ):
        testing.emulated(end_with, 1, args=[[86]])

    assert raised.value.outcomes[0].hung


def test_a_signal_is_named() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 was ended by SIGTERM"):
        testing.emulated(end_with, 1, args=[[-15]])


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(
        RanksFailedError, match=r"return_an_object returned what msgpack cannot take"
    ):
        testing.emulated(return_an_object, 1)


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(RanksFailedError, match=r"No module named 'missing_module'"):
        testing.emulated("missing_module:name", 1)


def test_outcomes_of_ranks_that_are_meant_to_fail() -> None:
    found = testing.outcomes(end_with, 4, args=[[0, 3, -9, 86]])

    assert [0, 3, -9, 86] == [each.exit_code for each in found]
    assert ["well", None, None, None] == [each.result for each in found]
    assert [False] * 4 == [each.late for each in found]


def test_outcomes_wait_for_ranks_that_still_run() -> None:
    found = testing.outcomes(die_or_wait, 2)

    assert [(0, "survived"), (-9, None)] == [
        (each.exit_code, each.result) for each in found
    ]


# Nothing is left


def test_what_a_rank_started_ends_with_it() -> None:
    pids = testing.emulated(leave_a_child_behind, 2)

    assert all(is_gone(pid) for pid in pids)


def test_a_nursery_that_was_killed_is_replaced() -> None:
    first = testing.emulated(nursery, 1)[0]
    os.kill(first, signal.SIGKILL)
    is_gone(first)
    second = testing.emulated(nursery, 1)[0]

    assert first != second


def test_nothing_outlives_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from weightsync import testing\n"
        "def parents():\n"
        "    return [os.getpid(), os.getppid()]\n"
        "if __name__ == '__main__':\n"
        "    print(*testing.emulated(parents, 1)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )

    assert all(is_gone(int(pid)) for pid in done.stdout.split())


def test_no_descriptor_is_left_open() -> None:
    testing.emulated(square, 2, args=[0])
    before = len(list(Path("/proc/self/fd").iterdir()))
    testing.emulated(square, 4, args=[0])
    testing.outcomes(end_with, 2, args=[[0, 3]])

    assert before == len(list(Path("/proc/self/fd").iterdir()))


# With NCCL


def test_ranks_talk_through_emulated_nccl() -> None:
    assert testing.emulated(gather_ranks, 2) == [[0, 1]] * 2


def test_a_rank_dies_at_the_operation_that_a_fault_names() -> None:
    found = testing.outcomes(
        *(gather_ranks, 2),
        faults="all_gather@rank=1,n=2:kill",
        hang_seconds=3,
        timeout=40,
    )

    assert found[1].exit_code == -signal.SIGKILL
    assert "kills itself, as the fault 'all_gather@rank=1,n=2:kill' asks" in (
        found[1].output
    )
    assert not found[0].ok


def test_a_rank_that_runs_out_of_memory_says_so() -> None:
    with pytest.raises(RanksFailedError, match=r"OutOfMemoryError"):
        testing.emulated(gather_ranks, 1, faults="out-of-memory=4096")
