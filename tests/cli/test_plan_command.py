"""``weightsync plan``: what it prints, writes and refuses, against numbers by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightsync.cli import main
from weightsync.cli.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Callable

PNG = b"\x89PNG\r\n\x1a\n"

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"

# Two trainers hold the rows of both tensors, two generators the columns of the first.
# Trainer 0 holds 2 of 4 rows of "a" and 2 of 3 of "b"; trainer 1 the others.
TRAINERS = """
[mesh]
fsdp = 2

[[tensors]]
names = "*"
shard = { fsdp = 0 }
"""
GENERATORS = """
[mesh]
tp = 2

[[tensors]]
names = ["a"]
shard = { tp = 1 }
"""
MODEL = """
[tensors]
a = { dtype = "bfloat16", shape = [4, 6] }
b = { dtype = "float32", shape = [3] }
"""

PAIRS = [
    # "a": 2 rows of 3 elements; "b": one run of 2 or of 1 elements.
    {"trainer": 0, "generator": 0, "nbytes": 12 + 8, "runs": 2, "rows": 3, "casts": 0},
    {"trainer": 1, "generator": 0, "nbytes": 12 + 4, "runs": 2, "rows": 3, "casts": 0},
    {"trainer": 0, "generator": 1, "nbytes": 12 + 8, "runs": 2, "rows": 3, "casts": 0},
    {"trainer": 1, "generator": 1, "nbytes": 12 + 4, "runs": 2, "rows": 3, "casts": 0},
]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Write three files, and run the command on them where they lie."""
    monkeypatch.chdir(tmp_path)

    def run(
        *options: str,
        trainers: str = TRAINERS,
        generators: str = GENERATORS,
        model: str = MODEL,
    ) -> int:
        Path("t.toml").write_text(trainers)
        Path("g.toml").write_text(generators)
        Path("m.toml").write_text(model)
        return main(["plan", "t.toml", "g.toml", "--model", "m.toml", *options])

    return run


def _json(path: str = "out.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    msgspec.convert(found, Summary)
    return found


def test_the_numbers_are_those_found_by_hand(plan: Callable[..., int]) -> None:
    code = plan("--json", "out.json")
    found = _json()

    assert 0 == code
    assert PAIRS == found["pairs"]
    assert (2, 60) == (found["tensors"], found["model_nbytes"])
    assert (72, 8, 12, 0) == tuple(
        found[k] for k in ("nbytes", "runs", "rows", "casts")
    )
    assert {
        "ranks": [40, 32],
        "ideal": 36.0,
        "largest": 40,
        "largest_rank": 0,
        "ratio": 40 / 36,
    } == found["sent"]
    assert [36, 36] == found["received"]["ranks"]
    assert 1.0 == found["received"]["ratio"]
    assert {"source": "t.toml", "mesh": {"fsdp": 2}} == found["trainers"]
    assert found["prediction"] is None
    assert [] == found["notes"]


def test_people_are_shown_who_sends_what(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    plan("--send-bandwidth", "1", "--receive-bandwidth", "0.5")
    shown = capsys.readouterr().out
    cells = [line.split("  ") for line in shown.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in cells]

    assert ["trainer 0", "20 B", "20 B", "40 B"] in rows
    assert ["trainer 1", "16 B", "16 B", "32 B"] in rows
    assert ["received", "36 B", "36 B", "72 B"] in rows
    assert ["sent by a trainer rank", "40 B", "0", "32 B", "36 B", "1.111"] in rows
    assert "8 runs of 9 B on average, which have 12 rows of 6 B; 72 B in all" in shown
    # 40 B at 1 GB/s take 40 ns, 36 B at 0.5 GB/s take 72 ns.
    assert (
        "Predicted: 0.072 us, the longer of 40 B sent at 1 GB/s and 36 B received at "
        "500 MB/s." in shown
    )


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (("--send-bandwidth", "2"), 40 / 2e9),
        (("--receive-bandwidth", "4"), 36 / 4e9),
        (("--send-bandwidth", "2", "--receive-bandwidth", "4"), 40 / 2e9),
    ],
)
def test_the_slowest_rank_gives_the_time(
    plan: Callable[..., int], options: tuple[str, ...], seconds: float
) -> None:
    plan("--json", "out.json", *options)

    assert pytest.approx(seconds) == _json()["prediction"]["seconds"]


def test_json_may_go_to_standard_output(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    plan("--json", "-")
    said = capsys.readouterr()

    assert PAIRS == json.loads(said.out)["pairs"]
    assert "trainer 0" in said.err


@pytest.mark.parametrize(
    ("file", "start"), [("out.png", PNG), ("out.svg", b"<?xml version")]
)
def test_a_picture_is_drawn(plan: Callable[..., int], file: str, start: bytes) -> None:
    code = plan("--picture", file)

    assert 0 == code
    assert start == Path(file).read_bytes()[: len(start)]


def test_many_ranks_are_shown_by_their_largest_pairs(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # 33 rows of "a" for 33 ranks; the last of them holds nothing else.
    plan(
        trainers=TRAINERS.replace("2", "33"),
        model='[tensors]\na = { dtype = "int8", shape = [33, 6] }\n'
        'b = { dtype = "int8", shape = [1] }',
    )
    shown = capsys.readouterr().out

    assert "The 20 pairs with the most bytes, of 66" in shown
    top = shown.split("rows\n")[1].splitlines()
    assert ["0", "0", "4", "B", "2", "2"] == top[0].split()
    assert ["0", "1", "4", "B", "2", "2"] == top[1].split()
    assert ["1", "0", "3", "B", "1", "1"] == top[2].split()


def test_of_copies_one_is_sent(plan: Callable[..., int]) -> None:
    trainers = '[mesh]\nreplicate = 2\nshard = 2\n\n[[tensors]]\nnames = "*"\n'
    plan("--json", "out.json", trainers=trainers + "shard = { shard = 0 }")
    found = _json()

    assert 72 == found["nbytes"]
    # "a" is sent by the ranks 0 and 1, "b" by the ranks 2 and 3.
    assert [24, 24, 16, 8] == found["sent"]["ranks"]


def test_a_dtype_of_one_side_is_converted(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    plan("--json", "out.json", trainers=TRAINERS + 'dtype = "float32"')
    found = _json()

    assert 72 == found["nbytes"]
    # Those of "a", to two generators from two trainers.
    assert 4 == found["casts"]
    assert "4 of the runs are converted first: push with cast=True" in (
        capsys.readouterr().out
    )


def test_a_rule_that_matches_nothing_is_noted(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan(trainers=TRAINERS + '\n[[tensors]]\nnames = "a"\n')

    assert 0 == code
    assert (
        "Note: t.toml: tensors[1] matches no tensor that no earlier rule matches."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--send-bandwidth", "0"), "'0' is no number of GB/s above 0"),
        (("--receive-bandwidth", "fast"), "'fast' is no number of GB/s above 0"),
        (("--picture", "out.pdf"), "'out.pdf' ends neither in .png nor in .svg"),
    ],
)
def test_a_wrong_argument_is_refused(
    plan: Callable[..., int],
    options: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*options)

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"trainers": "mesh = 3"}, "t.toml: mesh is 3, but must be a table"),
        ({"model": "[tensors]"}, "m.toml: there is no tensor in it"),
        (
            {"generators": GENERATORS.replace("tp = 1 }", "tp = 2 }")},
            "g.toml: tensors[0].shard cuts dim 2, but 'a' of shape (4, 6) has 2 dims",
        ),
        (
            {"trainers": TRAINERS + 'dtype = "int32"'},
            "dtype is int32 on trainer rank 0 and bfloat16 on replica 'g.toml'",
        ),
    ],
)
def test_bad_input_exits_with_2_and_a_sentence(
    plan: Callable[..., int],
    files: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = plan(**files)
    told = capsys.readouterr()

    assert 2 == code
    assert "" == told.out
    assert told.err.startswith("weightsync plan: ")
    assert said in told.err


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_file_that_cannot_be_written_is_named(
    plan: Callable[..., int], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan(option, "none/out.png")

    assert 2 == code
    assert "none/out.png: No such file or directory" in capsys.readouterr().err


def test_a_picture_without_matplotlib_says_what_to_install(
    plan: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("weightsync.cli.picture.find_spec", lambda _: None)

    assert 1 == plan("--picture", "out.png")
    assert "pip install 'weightsync[cli]'" in capsys.readouterr().err


def test_the_example_of_the_docs_prints_what_they_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`([a-z]+\.toml)`:\n\n```toml\n(.*?)```", page, re.S):
        Path(name).write_text(text)
    ((command, printed),) = re.findall(
        r"```console\n\$ weightsync (.*?)\n(.*?)```", page, re.S
    )
    code = main(command.split())

    assert 0 == code
    assert printed == capsys.readouterr().out


def test_the_package_declares_the_command() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()

    assert 'weightsync = "weightsync.cli:main"' in text
