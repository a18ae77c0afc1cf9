"""The benchmark, small: its commands, what they write, and that it notices errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from weightsync import Shard, testing
from weightsync.bench import cli, push, tables
from weightsync.bench.environment import Environment
from weightsync.bench.patterns import TILE_BYTES, VerificationError, fill, verify
from weightsync.bench.push import PushCase
from weightsync.bench.push_model import (
    DTYPE,
    MASTER,
    Cut,
    Held,
    Model,
    TorchCopy,
)
from weightsync.bench.results import GpuFigures, PushResult, PutResult, Report, Spread
from weightsync.bench.runner import Line, Processes, RunError
from weightsync.bench.table import Table
from weightsync.bench.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync.bench", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _report(text: str | bytes) -> Report:
    return msgspec.json.decode(text, type=Report, strict=True)


def test_put_signal_measures_verifies_and_draws(tmp_path: Path) -> None:
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = _bench(
        "put-signal",
        *("--sizes", "8,3KiB,1MiB", "--ranks", "3", "--repetitions", "3"),
        *("--warmup", "1", "--window", "4MiB"),
        *("--json", str(file), "--plot", str(plot)),
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "1 MiB" in done.stdout
    assert PNG == plot.read_bytes()[:8]
    (result,) = _report(file.read_bytes()).results
    assert isinstance(result, PutResult)
    assert [8, 3 << 10, 1 << 20] == [row.size for row in result.rows]
    assert [64, 64, 4] == [row.depth for row in result.rows]
    # At most 16 in a row, then all in flight; both ways, to each of two receivers, 3
    # times after one warm-up.
    puts = sum(row.size * (min(row.depth, 16) + row.depth) for row in result.rows)
    assert puts * 2 * 2 * 4 == result.verified
    assert [96, 96, 24] == [row.latency.count for row in result.rows]
    assert [6, 6, 6] == [row.burst.count for row in result.rows]
    assert all(row.latency.p50 <= row.latency.p99 for row in result.rows)
    assert all(row.bandwidth > 0 for row in result.rows)


def test_push_measures_verifies_and_draws(tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    done = _bench(
        "push",
        *("--total", "4MiB", "--tensors", "20", "--trainers", "2", "--replicas", "2"),
        *("--repetitions", "2", "--warmup", "1", "--mode", "swap"),
        *("--json", "-", "--plot", str(plot)),
    )

    assert 0 == done.returncode, done.stderr
    assert "swap" in done.stderr
    assert "<svg" in plot.read_text()
    (result,) = _report(done.stdout).results
    assert isinstance(result, PushResult)
    (row,) = result.rows
    assert ("model", "swap", 20, 2, 2) == (
        *(row.case, row.mode, row.tensors),
        *(row.trainers, row.replicas),
    )
    assert row.nbytes * 2 * 3 == row.verified == result.verified
    assert 0 < row.visible.p50 <= row.visible.p99
    assert 0 < min(row.trainer_gap, row.generator_gap)


@pytest.mark.parametrize(
    ("arguments", "trainers", "ranks", "said"),
    [
        ("--layout rows --mode inplace", 2, 1, "cut by rows"),
        ("--layout columns --mode staged --row-bytes 192", 1, 2, "rows of 192 B"),
        ("--layout columns --ranks 3 --mode swap --cast", 1, 3, "to bfloat16"),
        ("--layout rows --trainers 3 --mode staged --cast", 3, 1, "to bfloat16"),
        ("--layout rows --mode swap --replay", 2, 1, "kept for replays"),
    ],
)
def test_a_push_is_measured_for_every_layout(
    arguments: str, trainers: int, ranks: int, said: str
) -> None:
    line = "push --total 1MiB --tensors 9 --repetitions 1 --warmup 1 " + arguments
    (case,) = cli.parse(line.split()).cases
    assert isinstance(case, PushCase)
    result = push.run(case)

    (row,) = result.rows
    assert (trainers, ranks) == (case.trainers, case.ranks)
    assert row.nbytes * 2 == row.verified == result.verified
    assert 0 < row.torch.p50
    assert said in tables.table(result).plain()


def test_many_small_tensors_are_compared_with_one_large() -> None:
    line = "push --small --tensors 200 --mode staged --repetitions 2 --warmup 1"
    (case,) = cli.parse(line.split()).cases
    assert isinstance(case, PushCase)
    result = push.run(case)

    assert [("small", 200), ("one", 1)] == [(r.case, r.tensors) for r in result.rows]
    assert {200 << 10} == {row.nbytes for row in result.rows}
    assert {"staged"} == set(result.small_factor)


@testing.requires_emulator()
def test_puts_between_emulated_gpus_are_verified_and_said_to_be_none() -> None:
    done = _bench(
        *("put-signal", "--engine", "nccl", "--sizes", "8,64KiB"),
        *("--repetitions", "2", "--warmup", "1", "--json", "-"),
    )

    assert 0 == done.returncode, done.stderr
    assert "THE GPUS ARE EMULATED" in done.stderr
    assert "broadcast p50" in done.stderr
    (result,) = _report(done.stdout).results
    assert isinstance(result, PutResult)
    assert GpuFigures(emulated=True, kernels=None, overlap=None) == result.gpu
    # 16 in a row and 64 in flight, both ways, twice after one warm-up.
    assert (8 + (64 << 10)) * (16 + 64) * 2 * 3 == result.verified


@testing.requires_emulator()
def test_pushes_between_emulated_gpus_are_verified() -> None:
    line = "push --engine nccl --total 1MiB --tensors 9 --repetitions 1 --warmup 1"
    (case,) = cli.parse(f"{line} --mode staged --layout columns".split()).cases
    assert isinstance(case, PushCase)
    result = push.run(case)

    (row,) = result.rows
    assert row.nbytes * 2 == row.verified == result.verified
    assert (None, 7) == (row.torch, row.broadcast and row.broadcast.count)
    assert GpuFigures(emulated=True, kernels=None, overlap=None) == result.gpu


@pytest.mark.parametrize(
    "command", ["", "put-signal", "push", "plan", "emulator", "backend", "elastic"]
)
def test_help_explains_every_argument(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse([*command.split(), "--help"])

    assert 0 == ended.value.code
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "--plot" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["put-signal", "--sizes", "8,many"], "'many' is no size"),
        (["put-signal", "--sizes", "2MiB", "--window", "1MiB"], "smaller"),
        (["put-signal", "--ranks", "1"], "at least 2"),
        (["push", "--total", "1KiB"], "--total must be"),
        (["push", "--repetitions", "0"], "at least 1"),
        (["push", "--layout", "rows", "--trainers", "1"], "--trainers 2 or more"),
        (["push", "--layout", "columns", "--ranks", "1"], "--ranks 2 or more"),
        (["push", "--ranks", "2"], "--ranks needs --layout columns"),
        (["push", "--layout", "rows", "--small"], "--small needs --layout same"),
        (["push", "--row-bytes", "33"], "a multiple of 2"),
        (["push", "--row-bytes", "1MiB"], "at most 256 KiB"),
        (["push", "--plot", "out.pdf"], ".svg"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(arguments)

    assert 2 == ended.value.code
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels")
def test_dtypes_are_not_converted_on_emulated_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["push", "--engine", "nccl", "--cast"])

    assert "--cast needs --engine shm or GPUs" in capsys.readouterr().err


def test_output_arguments_may_stand_before_the_command() -> None:
    found = cli.parse(["--json", "-", "push"])

    assert "-" == found.json


def test_everything_runs_without_a_command() -> None:
    found = cli.parse([])

    assert [False, True] == [c.small for c in found.cases if isinstance(c, PushCase)]
    assert 3 == len(found.cases)


@pytest.mark.parametrize("size", [1, 8, 1003, TILE_BYTES, 2 * TILE_BYTES + 12])
def test_every_wrong_byte_is_noticed(size: int) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    fill(tensor, 1, 2)
    verify(tensor, 1, 2, what="memory")
    for place in {0, size // 2, size - 1}:
        tensor[place] ^= 1
        with pytest.raises(VerificationError, match=rf"memory: byte {place} is"):
            verify(tensor, 1, 2, what="memory")
        tensor[place] ^= 1


@pytest.mark.parametrize("pushed", [DTYPE, MASTER])
@pytest.mark.parametrize("cut", [Cut(), Cut(rows=3), Cut(columns=2)])
def test_a_wrong_byte_is_noticed_in_every_cell(cut: Cut, pushed: torch.dtype) -> None:
    model = Model("model", (40 << 10, 6 << 10), 2 << 10)
    source = Held(model, cut, pushed)
    source.fill(1)
    last = cut.columns - 1
    held = Held(model, cut, DTYPE, column=last if last else None)
    received = {
        name: _tensor(entry).chunk(cut.columns, 1)[last].to(DTYPE).contiguous()
        for name, entry in source.entries.items()
    }

    assert model.nbytes // cut.columns == held.verify(received, 1, pushed)
    with pytest.raises(VerificationError, match=r"version 2 of 'layers\.0"):
        held.verify(received, 2, pushed)
    for tensor in received.values():
        for place in (0, -1):
            wrong = tensor.view(torch.int16).view(-1)[place : place + 1 or None]
            wrong ^= 1
            with pytest.raises(VerificationError, match="version 1 of"):
                held.verify(received, 1, pushed)
            wrong ^= 1


def _tensor(entry: torch.Tensor | Shard) -> torch.Tensor:
    return entry.tensor if isinstance(entry, Shard) else entry


def test_what_is_converted_are_numbers() -> None:
    held = Held(Model("model", (1 << 20,)), Cut(), MASTER)
    held.fill(1)
    (tensor,) = map(_tensor, held.entries.values())

    assert tensor.isfinite().all()
    assert (tensor.to(DTYPE) != 0).all()


def test_torch_copies_what_a_push_moves() -> None:
    model, cut = Model("model", (8 << 10, 4 << 10), 2 << 10), Cut(columns=2)
    numbers = torch.arange(model.nbytes // 2, dtype=torch.float32)
    source, target = numbers.view(torch.uint8), torch.zeros(model.nbytes).byte()
    TorchCopy(model, cut, MASTER, source, target).seconds()

    wide = [t.view(-1, 1024) for t in numbers.split([4096, 2048])]
    expected = [half.flatten() for part in (0, 1) for half in _halves(wide, part)]
    assert torch.equal(torch.cat(expected).to(DTYPE), target.view(DTYPE))


def _halves(tensors: list[torch.Tensor], part: int) -> list[torch.Tensor]:
    return [tensor.chunk(2, 1)[part] for tensor in tensors]


@pytest.mark.parametrize("other", [(2, 2), (1, 3), (2, 1)])
def test_another_repetition_has_another_pattern(other: tuple[int, int]) -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    fill(tensor, 1, 2)
    with pytest.raises(VerificationError, match="expected"):
        verify(tensor, *other, what="memory")


def test_pieces_of_one_tensor_differ() -> None:
    tensor = torch.zeros(3 * TILE_BYTES, dtype=torch.uint8)
    fill(tensor, 1)

    assert 3 == len({bytes(piece[:64].tolist()) for piece in tensor.chunk(3)})


def _find_wrong_bytes(line: Line) -> None:
    verify(torch.zeros(8, dtype=torch.uint8), 1, what="memory")


def _fail(line: Line) -> None:
    raise LookupError("no such thing")


def _vanish(line: Line) -> None:
    os._exit(7)


def _say_nothing(line: Line) -> None:
    line._connection.recv()


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (_find_wrong_bytes, VerificationError, "child: memory: byte"),
        (_fail, RunError, "no such thing"),
        (_vanish, RunError, "exit code 7"),
    ],
)
def test_what_fails_in_a_process_fails_the_run(
    function: object, error: type[Exception], said: str
) -> None:
    with Processes() as started:
        children = [
            started.start("silent", _say_nothing),
            started.start("child", function),
        ]
        with pytest.raises(error, match=said):
            started.gather(children, timeout=20)


def test_a_silent_process_ends_the_run() -> None:
    with Processes() as started:
        child = started.start("silent", _say_nothing)
        with pytest.raises(RunError, match="silent said nothing"):
            started.gather([child], timeout=0.1)


def test_a_failed_run_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: object) -> PushResult:
        raise VerificationError("byte 3 is 4, expected 5")

    monkeypatch.setattr("weightsync.bench.push.run", wrong)

    assert 1 == cli.main(["push"])
    assert "VerificationError: byte 3" in capsys.readouterr().err


def test_too_little_memory_is_an_error_before_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 1 == cli.main(["push", "--total", "1024TiB"])
    assert "choose a smaller --total" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weightsync.bench.plots.find_spec", lambda _: None)

    assert 1 == cli.main(["push", "--plot", "out.png"])
    assert "pip install 'weightsync[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "cores", "count"), [(0.1, 4, 0), (3.0, 4, 1), (0.1, 1, 1), (9.0, 1, 2)]
)
def test_figures_that_mean_little_come_with_a_warning(
    load: float, cores: int, count: int
) -> None:
    found = Environment("", "", cores, 1 << 30, load, "", "", "")

    assert count == len(found.warnings(2))


@pytest.mark.parametrize(
    ("total", "tensors"), [(1 << 30, 300), (1 << 20, 3), (9999, 1)]
)
def test_a_model_has_the_tensors_and_the_bytes_that_were_asked_for(
    total: int, tensors: int
) -> None:
    model = Model.like_a_transformer(total, tensors)

    assert tensors == len(model.sizes)
    assert total - 2048 * tensors <= model.nbytes <= total


def test_percentiles_are_values_that_were_measured() -> None:
    assert Spread(50.5, 90.0, 99.0, 100) == Spread.of([float(i) for i in range(1, 101)])


def test_sizes_and_durations_read_well() -> None:
    assert [8, 3 << 10, 3 << 29] == [parse_size(t) for t in ("8B", "3k", "1.5 GiB")]
    assert ["8 B", "64 KiB", "-1.5 MiB"] == [
        format_size(n) for n in (8, 65536, -(3 << 19))
    ]
    assert ["12.3 us", "105 ms", "2 s"] == [
        format_seconds(s) for s in (12.34e-6, 0.105, 2.0)
    ]


def test_a_plain_table_is_aligned() -> None:
    found = Table("title", ("a", "long"), [("1", "2"), ("333", "4")], ["note"])

    assert "title\n  a  long\n  1     2\n333     4\nnote" == found.plain()
