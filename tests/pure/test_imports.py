"""What importing weightsync does, and does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightsync


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_is_there() -> None:
    homes = {name: getattr(weightsync, name) for name in weightsync.__all__}

    assert None not in homes.values()
    assert set(weightsync.__all__) <= set(dir(weightsync))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        weightsync.Trianer  # noqa: B018 -- looking is the point.


@pytest.mark.parametrize(
    "script",
    [
        "import weightsync",
        "from weightsync import testing; testing.environment()",
        "from weightsync.cli.main import _parser; _parser('emulate')",
    ],
)
def test_what_needs_no_torch_does_not_import_it(script: str) -> None:
    assert "False\n" == run(f"{script}; import sys; print('torch' in sys.modules)")


def test_torch_finds_the_backend_without_an_import_of_ours() -> None:
    found = run(
        "import torch.distributed as dist\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('weightsync-shm', store=store, rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "print(dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )

    assert "weightsync-shm\n" == found
