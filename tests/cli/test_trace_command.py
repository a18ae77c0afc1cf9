"""``weightsync trace``: which files it takes, and what it prints."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

from weightsync.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def entry(number: int, state: str) -> dict[str, Any]:
    return {
        "pg_id": 0,
        "state": state,
        "time_created_ns": 1_000_000_000 * number,
        "peer": None,
        "with_peer": 0,
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed.py", "line": 1},
            {"name": "step", "filename": "train.py", "line": 20},
        ],
        "profiling_name": "nccl:all_reduce",
        "is_p2p": False,
        "collective_seq_id": number,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[2, 3]],
        "output_dtypes": ["Float"],
    }


def dump(rank: int, *entries: dict[str, Any]) -> dict[str, Any]:
    group = {"id": 0, "name": "0", "description": "default_pg", "ranks": [0, 1]}
    return {
        "entries": list(entries),
        "weightsync": {
            "format": 1,
            "rank": rank,
            "process": 100 + rank,
            "host": "here",
            "time_ns": 5_000_000_000,
            "reason": "asked",
            "groups": [group],
            "operations": [],
        },
    }


def write(path: Path, found: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def test_operation_and_rank_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace_json"
    write(folder / "0.json", dump(0, entry(1, "completed"), entry(2, "scheduled")))
    write(folder / "1.json", dump(1, entry(1, "completed")))
    code = main(["trace", str(tmp_path)])

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "Rank 0 (process 100 on here): asked",
        "Rank 1 (process 101 on here): asked",
        "",
        (
            "group '0' (default_pg), collective 2: all_reduce of Float[2, 3]: "
            "some ranks have not come"
        ),
        "  rank 0 waits in it since 3 s",
        "  not there: rank 1",
        "  called at train.py:20 in step (rank 0)",
        "",
        "Stuck on rank 1, which waits for nobody.",
        (
            "  the last call of rank 1: all_reduce of Float[2, 3] in group '0' "
            "(default_pg), 4 s before its dump, finished"
        ),
        "  called at train.py:20 in step",
    ]


def test_a_job_that_is_not_stuck_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        str(write(tmp_path / f"{rank}.json", dump(rank, entry(1, "completed"))))
        for rank in range(2)
    ]

    assert main(["trace", *paths]) == 0
    assert "Nothing is stuck" in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    assert main(["trace", *map(str, paths)]) == 2
    return capsys.readouterr().err


def test_files_that_are_no_dumps_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "trace_0"
    foreign.write_bytes(pickle.dumps({"entries": []}))
    newer = dump(0)
    newer["weightsync"]["format"] = 9
    lost = dump(0, entry(1, "completed"))
    lost["weightsync"]["groups"] = []

    assert "is no JSON dump" in refused(capsys, foreign)
    assert "is no JSON dump" in refused(capsys, write(tmp_path / "a.json", {}))
    assert "has format 9" in refused(capsys, write(tmp_path / "b.json", newer))
    assert "does not list" in refused(capsys, write(tmp_path / "c.json", lost))
    assert "No such file" in refused(capsys, tmp_path / "nothing")


def test_a_folder_without_dumps_and_two_of_one_rank_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = refused(capsys, tmp_path)
    one, two = (write(tmp_path / f"{each}.json", dump(1)) for each in "ab")

    assert "no .json file" in empty
    assert "two of the files are of rank 1" in refused(capsys, one, two)
