"""The variables that put a process on the emulator, and where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync import testing
from weightsync.errors import PlanError, UnsupportedError
from weightsync.testing.libraries import (
    check_torch,
    find_libraries,
    library_folders,
    torch_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

LIBRARIES = (
    *("libweightsync_cudart.so", "libcuda.so.1"),
    *("libnvidia-ml.so.1", "libnccl.so.2"),
)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def installed(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in LIBRARIES:
        (folder / name).touch()
    return folder


def test_the_emulator_is_here() -> None:
    assert testing.reason() == ""
    assert testing.available()


def test_the_environment_names_the_libraries_and_the_defaults() -> None:
    folder = find_libraries(library_folders())

    assert {
        "LD_PRELOAD": f"{folder}/libweightsync_cudart.so:{folder}/libnccl.so.2",
        "LD_LIBRARY_PATH": str(folder),
        "WEIGHTSYNC_NCCL_LIBRARY": f"{folder}/libnccl.so.2",
        "WEIGHTSYNC_EMULATOR_GPUS": "8",
        "WEIGHTSYNC_EMULATOR_NCCL": "2.30.7",
        "WEIGHTSYNC_EMULATOR_FAULTS": "",
    } == testing.environment()


def test_the_environment_carries_what_is_asked() -> None:
    found = testing.environment(
        gpus=2,
        memory=1 << 30,
        nccl="2.31.2",
        faults=["put@n=2:stall", "no-symmetric"],
        hang_seconds=2.5,
    )

    assert found["WEIGHTSYNC_EMULATOR_GPUS"] == "2"
    assert found["WEIGHTSYNC_EMULATOR_MEMORY"] == str(1 << 30)
    assert found["WEIGHTSYNC_EMULATOR_NCCL"] == "2.31.2"
    assert found["WEIGHTSYNC_EMULATOR_FAULTS"] == "put@n=2:stall; no-symmetric"
    assert found["WEIGHTSYNC_EMULATOR_HANG_SECONDS"] == "2.5"


def test_what_is_preloaded_already_stays_first(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_libraries(library_folders())
    monkeypatch.setenv("LD_PRELOAD", "/lib/libasan.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    found = testing.environment()
    monkeypatch.setenv("LD_PRELOAD", found["LD_PRELOAD"])
    again = testing.environment()

    assert found["LD_PRELOAD"] == (
        f"/lib/libasan.so:{folder}/libweightsync_cudart.so:{folder}/libnccl.so.2"
    )
    assert found["LD_LIBRARY_PATH"] == f"{folder}:/opt/lib"
    assert again["LD_PRELOAD"] == found["LD_PRELOAD"]


def test_a_file_of_faults_stands_alone() -> None:
    assert testing.environment(faults="@f")["WEIGHTSYNC_EMULATOR_FAULTS"] == "@f"
    with pytest.raises(PlanError, match=r"a file of faults stands alone"):
        testing.environment(faults=["@f", "put:stall"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": -1}, "gpus is -1, but must be from 0 to 64"),
        ({"gpus": 65}, "gpus is 65, but must be from 0 to 64"),
        ({"memory": 0}, "memory is 0, but must be at least one byte"),
        (
            {"nccl": "2.1"},
            "nccl is '2.1', but must be one of 2.29.7, 2.30.7, 2.31.2, 2.32.3",
        ),
        ({"hang_seconds": -1}, "hang_seconds is -1, but must be 0 or more"),
    ],
)
def test_impossible_values_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        testing.environment(**options)

    assert str(raised.value) == message


@pytest.mark.parametrize("missing", LIBRARIES)
def test_libraries_are_found_where_all_of_them_are(
    missing: str, tmp_path: Path
) -> None:
    partly = installed(tmp_path / "partly")
    (partly / missing).unlink()
    wholly = installed(tmp_path / "wholly")

    assert find_libraries([partly, wholly]) == wholly


def test_missing_libraries_are_named_with_what_to_do(tmp_path: Path) -> None:
    folder = installed(tmp_path / "_emulator")
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (folder / name).unlink()
    with pytest.raises(UnsupportedError) as raised:
        find_libraries([folder])

    assert str(raised.value) == (
        f"the emulator is not complete: libcuda.so.1, libnccl.so.2 should be in "
        f"{folder}: install weightsync again, with pip install --no-build-isolation"
    )


def test_a_path_that_cannot_be_preloaded_is_refused(tmp_path: Path) -> None:
    folder = installed(tmp_path / "with blank")

    with pytest.raises(UnsupportedError, match=r"no path with a blank"):
        find_libraries([folder])


def test_a_torch_without_cuda_is_told_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(UnsupportedError) as raised:
        check_torch(tmp_path)
    with pytest.raises(UnsupportedError, match=r"torch is not installed"):
        check_torch(None)

    assert str(raised.value) == (
        f"the torch in {tmp_path} is built without CUDA, so it cannot use a GPU, "
        f"emulated or not: install a CUDA build of torch (it needs no GPU)"
    )


def test_this_torch_is_one_for_cuda() -> None:
    check_torch(torch_folder())


def test_the_marker_skips_only_where_there_is_no_emulator() -> None:
    mark = testing.requires_emulator().mark

    assert mark.name == "skipif"
    assert mark.args == (False,)
