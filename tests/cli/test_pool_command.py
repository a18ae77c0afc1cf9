"""``weightsync pool``: what it shows of a running job, and when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightsync
from tests.processes import driven
from tests.processes.driven import call
from tests.processes.harness import Processes, free_address
from weightsync.cli import main
from weightsync.cli.members import duration, lines
from weightsync.membership import (
    LastPush,
    Membership,
    MembershipEvent,
    Proposal,
    ReplicaMember,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

N = 1000
LEASE = 2.0


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.end()


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "weightsync.cli", "pool", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def output(*arguments: str, code: int = 0, **variables: str) -> str:
    """Run it to its end; return what it said."""
    with start(*arguments, **variables) as command:
        out, err = command.communicate(timeout=40)
    assert code == command.returncode, (out, err)
    return err if code else out


class Job:
    """Two trainer ranks; ``good`` holds version 1, ``bad`` has failed in version 2."""

    def __init__(self, processes: Processes) -> None:
        self.address = free_address()
        self.trainers = [
            processes.start(driven.trainer, self.address, rank, 2, N, LEASE)
            for rank in range(2)
        ]
        self.good, self.bad = (
            processes.start(
                driven.generator, self.address, name, 0, 1, N, "staged", LEASE
            )
            for name in ("good", "bad")
        )
        for child in (*self.trainers, self.good, self.bad):
            assert child.hear() == "open"
        for trainer in self.trainers:
            assert call(trainer, "wait_for_replicas", count=2).kind == "ok"
        self.push(1)
        call(self.good, "receive")

    def push(self, version: int) -> None:
        for trainer in self.trainers:
            driven.ask(trainer, "push", version=version)
        assert {"ok"} == {trainer.hear().kind for trainer in self.trainers}

    def freeze_bad(self) -> None:
        self.bad.kill(signal.SIGSTOP)
        self.push(2)


def cells(text: str, member: str) -> list[str]:
    """The cells of a member's row."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"{member}  ")]
    return re.split(r"  +", row)


def test_it_shows_members_versions_pushes_and_what_happened(
    processes: Processes,
) -> None:
    job = Job(processes)
    before = output(job.address)
    job.freeze_bad()
    after = output(WEIGHTSYNC_STORE=job.address)

    assert f"job 'default' at {job.address}: 2 of 2 trainer ranks, 2 replicas" in before
    assert ["trainer rank 0", "leader", *"-----", "-"] == cells(
        before, "trainer rank 0"
    )[:8]
    assert ["trainer rank 1", "active"] == cells(before, "trainer rank 1")[:2]
    assert "2.0 s" == cells(before, "trainer rank 1")[7]
    assert ["active", "1", "staged", "1"] == cells(before, "replica bad")[1:5]
    assert re.fullmatch(r"1 delivered \d.* ago", cells(before, "replica good")[5])
    assert ["active", "1", "staged", "2"] == cells(after, "replica good")[1:5]
    assert "replica bad" not in after
    assert "1 replica, version 2" in after
    silent = "replica 'bad' failed: replica 'bad' gave no sign of life for 2 s"
    assert re.search(rf"\d\d:\d\d:\d\d  {silent}\n", after)


def test_it_shows_who_waits_and_the_proposal_in_force(
    processes: Processes,
) -> None:
    address = free_address()
    with weightsync.blocking.Trainer(
        address, rank=0, world_size=1, admit="proposed"
    ) as trainer:
        for name in ("in", "out"):
            child = processes.start(driven.generator, address, name, 0, 1, N)
            assert child.hear() == "open"
        before = output(address)
        trainer.propose(["in", "later"])
        trainer.wait_for_replicas(1)
        after = output(address)

    assert "no proposal yet" in before
    assert ["waiting", "waiting"] == [
        cells(before, f"replica {name}")[1] for name in ("in", "out")
    ]
    assert "proposal 1 in force: in, later\n" in after
    assert ["active", "waiting"] == [
        cells(after, f"replica {name}")[1] for name in ("in", "out")
    ]


def test_as_json_it_is_what_membership_returns(processes: Processes) -> None:
    job = Job(processes)
    job.freeze_bad()
    (line,) = output(job.address, "--json").splitlines()
    found: dict[str, Any] = json.loads(line)
    good = found["membership"]["replicas"]["good"]

    assert (2, [0, 1]) == (
        found["membership"]["world_size"],
        [trainer["rank"] for trainer in found["membership"]["trainers"]],
    )
    assert (2, "active", LEASE) == (good["version"], good["state"], good["lease"])
    assert ("delivered", 2) == (good["push"]["status"], good["push"]["version"])
    assert list(range(1, 6)) == [event["number"] for event in found["events"]]
    assert ["joined"] * 4 + ["failed"] == [event["kind"] for event in found["events"]]


def test_watching_it_tells_what_happens_until_the_job_is_over(
    processes: Processes,
) -> None:
    job = Job(processes)
    with start(job.address, "--watch", "--json", "--interval", "0.05") as command:
        assert command.stdout is not None
        assert command.stderr is not None
        first = json.loads(command.stdout.readline())
        driven.close(job.bad)
        seen = _events_until(command, "left")
        driven.close(job.good, *reversed(job.trainers))
        command.communicate(timeout=40)

    assert 4 == len(first["events"])
    assert [("left", "bad")] == [(event["kind"], event["name"]) for event in seen]
    assert 0 == command.returncode


def _events_until(
    command: subprocess.Popen[str], kind: str
) -> Sequence[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    assert command.stdout is not None
    for line in command.stdout:
        seen += json.loads(line)["events"]
        if any(event["kind"] == kind for event in seen):
            break
    return seen


def test_watching_a_job_whose_trainers_die_ends_with_the_error(
    processes: Processes,
) -> None:
    job = Job(processes)
    with start(job.address, "--watch", "--interval", "0.05") as command:
        assert command.stdout is not None
        while "replica good" not in command.stdout.readline():
            pass
        job.trainers[1].kill()
        _, err = command.communicate(timeout=40)

    assert 1 == command.returncode
    assert "weightsync pool: trainer rank 1 failed" in err
    assert "Traceback" not in err


def test_a_job_that_is_not_there_is_an_error_in_time(processes: Processes) -> None:
    nobody = free_address()
    job = Job(processes)

    assert f"no store at {nobody}" in output(nobody, "--timeout", "0.5", code=1)
    assert "weightsync/other/leader" in output(
        job.address, "--job", "other", "--timeout", "0.5", code=1
    )


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["pool", "http://x"])
    for wrong in ("0", "soon"):
        with pytest.raises(SystemExit, match="2"):
            main(["pool", "--timeout", wrong])
    said = capsys.readouterr().err

    assert 2 == code
    assert "a store address is" in said
    assert 2 == said.count("no number of seconds")


def test_what_other_processes_say_cannot_play_with_the_terminal() -> None:
    evil = "\x1b[2J\n" + "x" * 500
    push = LastPush(1, "failed", evil, 3.0)
    replica = ReplicaMember(evil, 1, "staged", "active", None, push, 10.0, 1.0, 2.0)
    event = MembershipEvent(1, 0.0, "failed", "replica", "gen", evil)
    members = Membership(1, 1, None, (), {evil: replica}, proposal=Proposal(1, (evil,)))
    found = list(lines(members, [event], "job"))

    assert 9 == len(found)
    assert all(line.isprintable() for line in found)
    assert max(map(len, found)) < 500


@given(st.floats(0, 1e8))
def test_a_duration_is_short_and_not_far_from_the_truth(seconds: float) -> None:
    units = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
    words = duration(seconds).split()
    value = sum(
        float(number) * units[unit]
        for number, unit in zip(words[::2], words[1::2], strict=True)
    )

    assert len(words) in {2, 4}
    assert abs(value - seconds) <= max(0.5, 0.05 * seconds)
