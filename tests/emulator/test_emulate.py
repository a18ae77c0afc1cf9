"""``weightsync emulate``: what it hands to the program, and what comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync import testing
from weightsync.cli import main

# Every run imports torch, and so may the program.
pytestmark = pytest.mark.timeout(120)

SHELL = ("/bin/sh", "-c")


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does: it replaces its process by the program."""
    return subprocess.run(
        [sys.executable, "-m", "weightsync.cli", "emulate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def variables(*options: str) -> dict[str, str]:
    """Let a program print the environment that it got."""
    done = emulate(*options, "--", "/usr/bin/env", "-0")
    assert done.returncode == 0, done.stderr
    pairs = (entry.partition("=") for entry in done.stdout.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def test_a_program_gets_the_emulated_libraries() -> None:
    found = variables()
    expected = testing.environment()

    assert expected == {name: found.get(name) for name in expected}


def test_options_become_variables() -> None:
    found = variables(
        *("--gpus", "2", "--memory", "1GiB", "--nccl", "2.31.2"),
        *("--fault", "put@rank=1:stall", "--fault", "no-symmetric"),
        *("--hang-seconds", "2.5"),
    )

    assert found["WEIGHTSYNC_EMULATOR_GPUS"] == "2"
    assert found["WEIGHTSYNC_EMULATOR_MEMORY"] == str(1 << 30)
    assert found["WEIGHTSYNC_EMULATOR_NCCL"] == "2.31.2"
    assert found["WEIGHTSYNC_EMULATOR_FAULTS"] == "put@rank=1:stall; no-symmetric"
    assert found["WEIGHTSYNC_EMULATOR_HANG_SECONDS"] == "2.5"


def test_options_output_and_exit_code_of_the_program_are_its_own() -> None:
    script = 'echo "$@"; echo to-stderr >&2; exit 86'
    done = emulate("--gpus", "2", "--", *SHELL, script, "sh", "--gpus", "3", "--", "-x")

    assert done.stdout == "--gpus 3 -- -x\n"
    assert done.stderr == "to-stderr\n"
    assert done.returncode == 86


def test_the_two_dashes_may_be_left_out() -> None:
    assert emulate(*SHELL, "exit 5").returncode == 5


def test_the_program_replaces_the_command_and_its_signals_are_its_own() -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "weightsync.cli", "emulate", "--"),
            *(*SHELL, "echo $$; kill -TERM $$"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        printed, _ = process.communicate(timeout=100)

    assert printed == f"{process.pid}\n"
    assert process.returncode == -signal.SIGTERM


def test_what_a_program_starts_sees_emulated_gpus() -> None:
    script = (
        "import subprocess, sys\n"
        "count = 'import torch; print(torch.cuda.device_count())'\n"
        "subprocess.run([sys.executable, '-c', count], check=True)\n"
    )
    done = emulate("--gpus", "3", "--", sys.executable, "-c", script)

    assert done.stdout == "3\n", done.stderr


def test_torchrun_runs_on_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "rank = int(os.environ['LOCAL_RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl')\n"
        "number = torch.tensor([rank + 1]).cuda()\n"
        "dist.all_reduce(number)\n"
        "dist.destroy_process_group()\n"
        "os.write(1, f'{rank} {number.cpu().item()}\\n'.encode())\n"
    )
    torchrun = Path(sys.executable).with_name("torchrun")
    done = emulate(
        *("--gpus", "2", "--", str(torchrun)),
        *("--standalone", "--nproc-per-node", "2", str(program)),
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 3"]


def test_ctrl_c_ends_a_program_whose_work_never_ends() -> None:
    script = (
        "import signal, time, torch, torch.distributed as dist\n"
        # Ignored where the tests themselves run in the background of a shell.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('nccl', store=store, rank=0, world_size=1)\n"
        "dist.all_reduce(torch.tensor([1]).cuda())\n"
        "print('waits', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "weightsync.cli", "emulate"]
    command += ["--fault", "all_reduce:stall", "--", sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)

    assert said == "waits\n"
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors


def test_a_program_that_does_not_exist_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["emulate", "--", "/nowhere/program"])

    assert code == 2
    assert capsys.readouterr().err == (
        "weightsync emulate: cannot run '/nowhere/program': No such file or directory\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--"], ["--gpus", "2"]])
def test_a_program_must_be_given(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["emulate", *arguments])

    assert code == 2
    assert "no program is given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "two"], "'two' is no number of GPUs"),
        (["--memory", "much"], "'much' is no size"),
        (["--nccl", "2.27"], "invalid choice: '2.27'"),
        (["--hang-seconds", "soon"], "'soon' is no number of seconds"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["emulate", *arguments, "--", "true"])

    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_too_many_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["emulate", "--gpus", "65", "--", "true"])

    assert code == 2
    assert "gpus is 65, but must be from 0 to 64" in capsys.readouterr().err


def test_a_fault_that_cannot_be_read_ends_the_program_with_the_reason() -> None:
    done = emulate("--fault", "put:explode", "--", str(Path(sys.executable)), "-c", "")

    assert done.returncode == 2
    assert "weightsync emulator: WEIGHTSYNC_EMULATOR_FAULTS: " in done.stderr
    assert "the fault 'put:explode': the action is 'explode'" in done.stderr
