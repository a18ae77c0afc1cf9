"""Who has the name of a backend: fresh processes, other packages, and parts of groups.

``test_names.py`` tests the same names where weightsync is imported and alone.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from weightsync import PlanError, testing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = testing.requires_emulator()

OURS: Final = "weightsync-nccl2"


def opened(name: str) -> Any:
    """Open a group of this process alone."""
    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    return dist.group.WORLD


def summed(group: Any) -> int:
    number = torch.tensor([7]).cuda()
    dist.all_reduce(number, group=group)
    return int(number.cpu().item())


# Other packages


def made_by_another_package(options: Any, _: Any) -> Any:
    """Create what another package would: not ours."""
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def replaced() -> list[Any]:
    from weightsync import backend

    backend.use_as_nccl2()
    dist.Backend.register_backend(
        "nccl2", made_by_another_package, extended_api=True, devices=["cuda"]
    )
    with pytest.raises(PlanError, match="has registered that name"):
        backend.use_as_nccl2()
    group = opened("nccl2")
    ours = dist.new_group(backend=OURS)
    return [backend.implementation_of(each) for each in (group, ours)] + [summed(ours)]


def test_another_package_that_comes_later_has_the_name_and_that_shows() -> None:
    assert [["torch", "weightsync", 7]] == testing.emulated(replaced, 1)


def announced(folder: str, torch_has_it: bool) -> list[Any]:
    """Have another package installed that says it has an ``nccl2``."""
    sys.path.insert(0, folder)
    if not torch_has_it:
        # What a build without CUDA lacks.
        del dist.distributed_c10d.ProcessGroupNCCL2
    dist.Backend._plugins.pop("NCCL2", None)
    from weightsync import backend

    backend.register()
    before = "NCCL2" in dist.Backend._plugins
    backend.use_as_nccl2()
    return [before, backend.implementation_of(opened("nccl2"))]


@pytest.mark.parametrize("torch_has_it", [True, False], ids=["with", "without"])
def test_a_package_that_only_announces_the_name_loses_it_when_asked(
    torch_has_it: bool, tmp_path: Path
) -> None:
    metadata = tmp_path / "another-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: another\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.distributed.backends]\nnccl2 = another:register\n"
    )
    found = testing.emulated(announced, 1, args=[str(tmp_path), torch_has_it])

    assert [[False, "weightsync"]] == found


# Parts, letters and wrappers


def parts() -> list[Any]:
    from weightsync import backend

    world = opened(f"cpu:gloo,cuda:{OURS}")
    groups = [dist.new_group(backend=each) for each in (None, "nccl2", OURS)]
    shared = dist.new_group(backend=backend.SHM)
    return [
        *(backend.implementation_of(each) for each in (world, *groups)),
        backend.implementation_of(world, "cpu"),
        backend.implementation_of(shared, "cpu"),
        *(summed(each) for each in groups),
    ]


def test_parts_of_a_group_tell_whose_they_are() -> None:
    found = testing.emulated(parts, 1)

    named = ["weightsync", "weightsync", "torch", "weightsync", "torch", "weightsync"]
    assert [[*named, 7, 7, 7]] == found


def wrapped(name: str) -> list[Any]:
    from weightsync import backend

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = opened(name)
    inside = group._get_backend(torch.device("cuda"))
    return [
        type(inside).__name__,
        backend.implementation_of(group),
        summed(group),
    ]


@pytest.mark.parametrize(("name", "whose"), [(OURS, "weightsync"), ("nccl2", "torch")])
def test_a_group_in_a_wrapper_of_torch_tells_whose_it_is(name: str, whose: str) -> None:
    found = testing.emulated(wrapped, 1, args=[name])

    assert [["_ProcessGroupWrapper", whose, 7]] == found


def in_capitals() -> list[Any]:
    from weightsync import backend

    backend.use_as_nccl2()
    found = []
    for name in ("NCCL2", "Weightsync-NCCL2"):
        group = opened(name)
        found += [backend.implementation_of(group), summed(group)]
        dist.destroy_process_group()
    return found


def test_letters_may_be_capitals_as_in_names_of_torch() -> None:
    assert [["weightsync", 7] * 2] == testing.emulated(in_capitals, 1)


# Fresh processes


def fresh(program: str) -> str:
    """Run a program that begins like a user's: with torch and nothing of ours."""
    begin = """
        import sys
        import torch
        import torch.distributed as dist

        def opened(name):
            torch.cuda.set_device(0)
            store = dist.HashStore()
            dist.init_process_group(name, store=store, rank=0, world_size=1)
            return dist.group.WORLD._get_backend(torch.device("cuda"))

        def summed():
            number = torch.tensor([7]).cuda()
            dist.all_reduce(number)
            return number.item()

        def whose(backend):
            return type(backend).__module__.partition(".")[0]
    """
    emulate = ("-m", "weightsync.cli", "emulate", "--gpus", "1", "--")
    text = textwrap.dedent(begin) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, *emulate, sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_our_name_is_known_to_a_program_that_does_not_import_us() -> None:
    found = fresh(f"""
        print("weightsync" in sys.modules, whose(opened("{OURS}")), summed())
        dist.destroy_process_group()
    """)

    assert "False weightsync 7" == found


def test_to_import_us_changes_nothing_for_a_group_of_torch() -> None:
    found = fresh(f"""
        first = opened("nccl2")
        print(whose(first), summed())
        import weightsync.backend
        weightsync.backend.register()
        later = dist.new_group()._get_backend(torch.device("cuda"))
        print(whose(later), summed())
        dist.destroy_process_group()
        print(whose(opened("nccl2")), summed())
        dist.destroy_process_group()
        print(whose(opened("{OURS}")), summed())
        dist.destroy_process_group()
    """)

    assert ["torch 7"] * 3 + ["weightsync 7"] == found.splitlines()


# What a core that cannot be used is like, and what is said of it.
UNUSABLE: Final = {
    "another torch": (
        'torch.__version__ = torch.torch_version.TorchVersion("2.99.0")',
        "cannot run with torch 2.99.0; reinstall weightsync with this torch",
    ),
    "no core": (
        'sys.modules["weightsync._C"] = None',
        "weightsync's core cannot be loaded with torch",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_core_that_cannot_be_used_says_so_and_registers_nothing(kind: str) -> None:
    broken, said = UNUSABLE[kind]
    found = fresh(f"""
        {broken}
        for attempt in range(2):
            try:
                opened("{OURS}")
            except RuntimeError as error:
                print(type(error.__cause__).__name__, error.__cause__)
            try:
                import weightsync.backend
            except Exception as error:
                print(type(error).__name__, error)
        print("{OURS.upper()}" in dist.Backend._plugins, dist.is_initialized())
        print(whose(opened("nccl2")), summed())
        dist.destroy_process_group()
    """)

    *errors, registered, works = found.splitlines()
    assert 4 == len(errors)
    assert all(each.startswith("UnsupportedError ") and said in each for each in errors)
    assert ["False False", "torch 7"] == [registered, works]
