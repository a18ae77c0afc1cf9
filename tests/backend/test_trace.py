"""What the flight recorder writes of real ranks, and what is read out of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.conformance.group import TIMEOUT, job, rank, world
from tests.conformance.windows import board, numbers
from weightsync import testing
from weightsync.cli import main

# The analyser of torch is a program, and imports torch.
pytestmark = [testing.requires_emulator(), pytest.mark.timeout(180)]

OURS: Final = "weightsync-nccl2"
SHORT: Final = timedelta(seconds=1)

# The emulator ends ranks that disagree, which hardware does not: so they do not meet.
UNANSWERED: Final[Any] = {
    "faults": "all_reduce@n=2:stall; broadcast@n=1:stall",
    "hang_seconds": 0,
}
BUFFER: Final = "WEIGHTSYNC_TRACE_BUFFER"


def meet(name: str) -> None:
    """Wait until all ranks have come here, by the store and not by a collective."""
    store = board()
    store.add(name, 1)
    began = time.monotonic()
    while int(store.add(name, 0)) < world():
        assert time.monotonic() - began < TIMEOUT.total_seconds()
        time.sleep(0.01)


def dump(prefix: str) -> None:
    from weightsync.backend import dump_trace

    dump_trace(prefix)


def numbered(device: torch.device, count: int = 4) -> torch.Tensor:
    return numbers(1, count, torch.float32).to(device)


def stuck(call: Any, limit: timedelta = SHORT) -> None:
    """Make a call that nobody answers, and wait for it in vain."""
    with contextlib.suppress(RuntimeError):
        call().wait(limit)


def leave(prefix: str) -> None:
    """Dump when all are where they stay, and end the group without its operations."""
    meet("stuck")
    dump(prefix)
    meet("dumped")
    group: Any = dist.group.WORLD
    group.abort()


def broken(prefix: str, what: str) -> None:
    with contextlib.ExitStack() as left_open:
        device = left_open.enter_context(job(OURS))
        left_open.pop_all()  # nothing is destroyed that others do not answer
    tensor = numbered(device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    SCENES[what](tensor)
    leave(prefix)


def does_not_come(tensor: torch.Tensor) -> None:
    if rank() != 1:
        stuck(lambda: dist.all_reduce(tensor, async_op=True))


def calls_another(tensor: torch.Tensor) -> None:
    if rank() == 1:
        stuck(lambda: dist.broadcast(tensor, 0, async_op=True))
    else:
        stuck(lambda: dist.all_reduce(tensor, async_op=True))


def gives_another_size(tensor: torch.Tensor) -> None:
    part = tensor[: 2 if rank() == 1 else 4]
    stuck(lambda: dist.all_reduce(part, async_op=True))


def sends_to_nobody(tensor: torch.Tensor) -> None:
    if rank() == 0:
        stuck(lambda: dist.isend(tensor, 2))


SCENES: Final = {
    "does not come": does_not_come,
    "calls another": calls_another,
    "gives another size": gives_another_size,
    "sends to nobody": sends_to_nobody,
}


def analysed(folder: Path, *options: str) -> str:
    """Let torch's own analyser read the pickles."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"),
            *(str(folder), "--prefix", "trace_", *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def traced(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Let our own command read the JSON."""
    assert main(["trace", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "trace_")


def test_both_analysers_name_a_rank_that_does_not_come(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    testing.emulated(broken, 3, args=[prefix, "does not come"])
    ours, theirs = traced(tmp_path, capsys), analysed(tmp_path)

    assert "group '0' (default_pg), collective 2: all_reduce of Float[4]: some" in ours
    assert "  ranks 0 and 2 wait in it since" in ours
    assert "Stuck on rank 1, which waits for nobody." in ours
    assert "Not all ranks joining collective, sequence number: 2" in theirs
    assert "missing ranks: {1}" in theirs


def test_both_analysers_name_a_rank_that_calls_another_collective(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    testing.emulated(broken, 3, args=[prefix, "calls another"], **UNANSWERED)
    ours, theirs = traced(tmp_path, capsys), analysed(tmp_path)

    assert "collective 2: all_reduce of Float[4]: the ranks do not agree" in ours
    assert "rank 1 called broadcast of Float[4]" in ours
    assert "Culprit rank 1" in theirs
    assert "COLLECTIVE_TYPE_MISMATCH" in theirs


def test_both_analysers_name_a_rank_that_gives_another_size(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    testing.emulated(broken, 3, args=[prefix, "gives another size"], **UNANSWERED)
    ours, theirs = traced(tmp_path, capsys), analysed(tmp_path)

    assert "rank 0 called all_reduce of Float[4]" in ours
    assert "rank 1 called all_reduce of Float[2]" in ours
    assert "Culprit rank 1" in theirs
    assert "SIZE_OR_SYNTAX_MISMATCH" in theirs


def test_a_message_that_nobody_receives_is_named(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    testing.emulated(broken, 3, args=[prefix, "sends to nobody"])
    ours = traced(tmp_path, capsys)

    assert "message 1 from 0 to 2: send of Float[4]: the other rank has no" in ours
    assert "Stuck on rank 2, which waits for nobody." in ours


def times_out(prefix: str) -> list[bool]:
    os.environ["WEIGHTSYNC_TRACE_FILE"] = prefix
    with contextlib.ExitStack() as left_open:
        device = left_open.enter_context(job(OURS, timeout=SHORT))
        left_open.pop_all()
    tensor = numbered(device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    meet("begun")
    if rank() == 0:
        work: Any = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
    meet("over")
    group: Any = dist.group.WORLD
    group.abort()
    found = Path(f"{prefix}json", f"{rank()}.json")
    return [found.exists()]


def test_a_timeout_writes_the_dump_of_its_rank(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = testing.emulated(times_out, 2, args=[prefix])
    own = json.loads(Path(f"{prefix}json", "0.json").read_text())["weightsync"]
    ours = traced(tmp_path, capsys)

    assert found == [[True], [False]]
    assert "timed out" in own["reason"]
    assert "No dump: rank 1" in ours
    assert "Stuck on rank 1" in ours


def asked_by_signal(prefix: str) -> str:
    os.environ["WEIGHTSYNC_TRACE_FILE"] = prefix
    os.environ["WEIGHTSYNC_TRACE_SIGNAL"] = "USR2"
    with job(OURS) as device:
        dist.all_reduce(numbered(device))
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGUSR2)
        written = Path(f"{prefix}{rank()}")  # the last of both
        began = time.monotonic()
        while not written.exists() and time.monotonic() - began < 30:
            time.sleep(0.01)
    found = json.loads(Path(f"{prefix}json", f"{rank()}.json").read_text())
    return str(found["weightsync"]["reason"])


def test_a_signal_writes_a_dump(prefix: str) -> None:
    found = testing.emulated(asked_by_signal, 2, args=[prefix])

    assert found == ["asked for by a signal"] * 2


def recorded(capacity: int, variables: dict[str, str]) -> dict[str, Any]:
    """Return what is recorded of a few operations that all end well."""
    from weightsync import _C

    os.environ.update({BUFFER: str(capacity)} | variables)
    with job(OURS) as device:
        tensor, large = numbered(device), numbered(device, 4 * world())
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(large, tensor)
        other = (rank() + 1) % world()
        ops = [
            dist.P2POp(dist.isend, tensor, other),
            dist.P2POp(dist.irecv, torch.empty_like(tensor), other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait(TIMEOUT)
        dist.barrier()
        torch.cuda.synchronize()
        found: dict[str, Any] = json.loads(_C.trace_json("asked"))
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [entry["profiling_name"] for entry in found["entries"]]


def test_every_operation_is_recorded_with_its_sizes_and_times() -> None:
    found = testing.emulated(recorded, 2, args=[100, {}])[0]
    first, second = found["entries"][:2]

    assert names(found) == [
        "nccl:all_reduce",
        "nccl:_all_gather_base",
        "nccl:send 0->1",
        "nccl:recv 0<-1",
        "nccl:coalesced",
        "nccl:barrier",
    ]
    assert [each["collective_seq_id"] for each in found["entries"]] == [
        1,
        2,
        2,
        2,
        2,
        3,
    ]
    assert [each["p2p_seq_id"] for each in found["entries"]] == [0, 0, 1, 1, 1, 1]
    assert first["state"] == "completed"
    assert first["time_created_ns"] <= first["time_discovered_completed_ns"]
    assert (second["input_sizes"], second["output_sizes"]) == ([[4]], [[8]])
    assert found["pg_config"]["0"]["ranks"] == "[0, 1]"
    assert found["comm_lib_version"] == "2.30.7"


def test_the_oldest_operations_make_room() -> None:
    found = testing.emulated(recorded, 2, args=[2, {}])[0]

    assert names(found) == ["nccl:coalesced", "nccl:barrier"]


def test_nothing_is_recorded_with_a_buffer_of_nothing() -> None:
    found = testing.emulated(recorded, 2, args=[0, {}])[0]

    assert names(found) == []


def test_the_places_in_python_are_recorded_if_they_are_asked_for() -> None:
    frames = {"WEIGHTSYNC_TRACE_FRAMES": "1"}
    found = testing.emulated(recorded, 2, args=[100, frames])[0]
    where = [frame["name"] for frame in found["entries"][0]["frames"]]

    assert "recorded" in where
    assert any(
        frame["filename"] == __file__ and frame["line"] > 0
        for frame in found["entries"][0]["frames"]
    )


def test_torch_reads_what_ends_well(prefix: str, tmp_path: Path) -> None:
    testing.emulated(dumped, 2, args=[prefix])
    theirs = analysed(tmp_path)

    assert "Not all ranks joining" not in theirs
    assert "Culprit" not in theirs


def dumped(prefix: str) -> None:
    with job(OURS) as device:
        tensor = numbered(device)
        lists = [torch.empty_like(tensor) for _ in range(world())]
        dist.all_reduce(tensor)
        dist.all_gather(lists, tensor)
        dist.reduce_scatter(tensor, lists)
        dist.all_to_all(lists, [each.clone() for each in lists])
        dist.broadcast(tensor, 0)
        dist.gather(tensor, lists if rank() == 0 else None)
        dist.scatter(tensor, lists if rank() == 0 else None)
        dist.barrier()
        torch.cuda.synchronize()
        dump(prefix)
