"""Forked children, processes that never close, and transports that are dropped."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
import weightsync.blocking
from tests.processes import driven
from tests.processes.driven import call

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes

ROOT = Path(__file__).parents[2]


def _in_child(work: Any, seconds: float = 10) -> int:
    """Run in a forked child; return its exit code, or 124 if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124


def _trains_and_forks(control: Control, address: str) -> list[int]:
    source = torch.zeros(1000)
    codes: list[int] = []
    with weightsync.blocking.Trainer(
        address, rank=0, world_size=1, timeout=20
    ) as transport:
        transport.wait_for_replicas(1)

        def use() -> int:
            try:
                transport.push({"w": source}, timeout=5)
            except weightsync.ClosedError as error:
                return 0 if "fork" in str(error) else 2
            return 3

        def close() -> int:
            transport.close()
            return 0

        def drop() -> int:
            nonlocal transport
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                del transport
                gc.collect()
            return 0

        for version, work in enumerate((use, close, drop), start=1):
            codes.append(_in_child(work))
            source.fill_(version)
            transport.push({"w": source}, version=version, timeout=5)
    return codes


def _generates_and_forks(control: Control, address: str) -> list[Any]:
    weight = torch.zeros(1000)
    found: list[Any] = []
    with weightsync.blocking.Generator(
        address, {"w": weight}, replica="gen", rank=0, world_size=1, timeout=20
    ) as transport:

        def use() -> int:
            try:
                transport.receive(timeout=5)
            except weightsync.ClosedError as error:
                return 0 if "fork" in str(error) else 2
            return 3

        def close() -> int:
            transport.close()
            return 0

        for work in (use, close, lambda: gc.collect() and 0):
            found.append(_in_child(work))
            update = transport.receive()
            found.append((update.version, float(weight[0])))
    return found


def test_a_forked_child_gets_an_error_and_its_parent_goes_on(
    processes: Processes, address: str
) -> None:
    generator = processes.start(_generates_and_forks, address)
    trainer = processes.start(_trains_and_forks, address)

    assert [0, (1, 1.0), 0, (2, 2.0), 0, (3, 3.0)] == generator.result(45)
    assert [0, 0, 0] == trainer.result(45)


def _leaves_a_child_behind(control: Control, address: str) -> None:
    with weightsync.blocking.Trainer(address, rank=0, world_size=1) as transport:
        transport.wait_for_replicas(1)
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        control.say(pid)
        time.sleep(20)


def test_a_death_is_noticed_although_a_forked_child_lives_on(
    processes: Processes, address: str
) -> None:
    generator = processes.start(driven.generator, address, "gen", 0, 1, 1000)
    trainer = processes.start(_leaves_a_child_behind, address)
    orphan = trainer.hear()
    try:
        assert generator.hear() == "open"
        trainer.kill()
        told = call(generator, "receive", timeout=5)

        assert "PeerError" == told.kind
        assert "trainer rank 0" in told.value
        assert driven.close(generator) < 5

        again = processes.start(driven.trainer, address, 0, 1, 1000)

        assert again.hear() == "open"
        assert driven.close(again) < 5
    finally:
        os.kill(orphan, signal.SIGKILL)


PROGRAM = """
import sys, torch, weightsync, weightsync.blocking
trainer = weightsync.blocking.Trainer("tcp://127.0.0.1:0", rank=0, world_size=1)
trainer.__enter__()
weight = torch.zeros(1000)
generator = weightsync.blocking.Generator(
    trainer.address, {"w": weight}, replica="gen", rank=0, world_size=1, mode="%s"
)
generator.__enter__()
trainer.wait_for_replicas(1)
trainer.push({"w": torch.ones(1000)})
generator.receive()
assert float(weight.sum()) == 1000.0
%s
"""


WAITING = "import threading; threading.Thread(target=%s, daemon=True).start()"


@pytest.mark.parametrize(
    ("last", "code", "mode"),
    [
        ("sys.exit(3)", 3, "swap"),
        ("raise ValueError('mine')", 1, "staged"),
        (WAITING % "generator.receive", 0, "swap"),
        (WAITING % "lambda: trainer.wait_for_replicas(2)", 0, "staged"),
    ],
    ids=["exit", "raise", "receiving", "waiting"],
)
def test_a_process_that_never_closes_ends_with_its_own_exit_code(
    last: str, code: int, mode: str
) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", PROGRAM % (mode, last)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )

    assert code == done.returncode, done.stderr
    assert "terminate called" not in done.stderr
    assert "Fatal Python error" not in done.stderr
    assert time.monotonic() - started < 30


def test_a_transport_that_is_dropped_open_warns(address: str) -> None:
    def drop() -> None:
        transport = weightsync.blocking.Trainer(address, rank=0, world_size=1)
        transport.__enter__()
        kept.append(transport._core)
        del transport
        gc.collect()

    kept: list[Any] = []
    with pytest.warns(ResourceWarning, match="unclosed <trainer rank 0 of 1"):
        drop()
    runtime = kept[0].end()
    assert runtime is not None
    runtime.call(kept[0].last_session.close)
    runtime.close()
