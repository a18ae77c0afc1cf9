"""The benchmark of plans, small: what it measures, and that it notices wrong plans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from weightsync.bench import cli, plan
from weightsync.bench.patterns import VerificationError
from weightsync.bench.plan import PlanCase
from weightsync.bench.plan_model import MoeModel, generators, trainers
from weightsync.bench.plan_ranks import verify_pair
from weightsync.bench.results import PlanResult, Report
from weightsync.cli.placing import place
from weightsync.plan import make_plan

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"

TINY = MoeModel(
    num_hidden_layers=3,
    n_routed_experts=8,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_attention_heads=4,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    vocab_size=256,
)
CASE = PlanCase((4, 8), 4, 2, 2, TINY)


def test_the_model_is_the_published_one() -> None:
    tensors = MoeModel().tensors()
    elements = {t.name: t for t in tensors}

    assert 1.026e12 < sum([t.nbytes for t in tensors]) / 2 < 1.027e12
    assert 60 * 384 * 3 == len([t for t in tensors if ".experts." in t.name])
    assert (12288, 1536) == elements["model.layers.0.self_attn.q_b_proj.weight"].shape
    assert (576, 7168) == elements[
        "model.layers.7.self_attn.kv_a_proj_with_mqa.weight"
    ].shape
    assert (16384, 512) == elements["model.layers.60.self_attn.kv_b_proj.weight"].shape
    assert (7168, 18432) == elements["model.layers.0.mlp.down_proj.weight"].shape
    assert "model.layers.0.mlp.experts.0.up_proj.weight" not in elements


def test_plans_are_measured_and_verified() -> None:
    result = plan.run(CASE)
    first, last = result.rows

    assert [4, 8] == [row.trainers for row in result.rows]
    assert (4, len(TINY.tensors())) == (
        result.parameters["generators"],
        result.parameters["tensors"],
    )
    for row in (first, last):
        assert 0 < min(row.trainer, row.generator, row.checked, row.summed)
        assert 0 < row.trainer_runs <= row.trainer_rows
        assert 0 < row.generator_runs <= row.generator_rows
        assert 1.0 <= row.largest_sender < 1.5
    assert first.verified + last.verified == result.verified > 0


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    code = cli.main(
        [
            *("plan", "--trainers", "4", "--expert-parallel", "2"),
            *("--generator-expert-parallel", "2", "--tensor-parallel", "2"),
            *("--layers", "2", "--experts", "4"),
            *("--json", str(file), "--plot", str(picture)),
        ]
    )
    report = msgspec.json.decode(file.read_bytes(), type=Report, strict=True)
    (result,) = report.results

    assert 0 == code
    assert isinstance(result, PlanResult)
    assert [4] == [row.trainers for row in result.rows]
    assert PNG == picture.read_bytes()[:8]


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["plan", "--help"])

    assert 0 == ended.value.code
    assert "groups of trainers that share the experts" in " ".join(
        capsys.readouterr().out.split()
    )


def test_ranks_that_form_no_groups_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["plan", "--trainers", "32,40"])

    assert 2 == ended.value.code
    assert "40 ranks cannot form groups of 32" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["source_offset", "target_offset", "rows"])
def test_a_wrong_plan_is_noticed(change: str) -> None:
    pushed = place(trainers(4, 2), TINY.tensors()).manifests
    wanted = place(generators(2, 2), TINY.tensors()).manifests
    right = make_plan(pushed, wanted, trainer=1)
    pair = right.pairs[0]
    verify_pair(right, pushed, wanted, pair)
    first = right.runs(*pair)[0]
    size = {"source_offset": 2, "target_offset": 2, "rows": -1}[change]
    run = first._replace(**{change: getattr(first, change) + size})
    wrong = replace(right, _runs={pair: (run, *right.runs(*pair)[1:])})

    with pytest.raises(VerificationError, match="trainer rank 1"):
        verify_pair(wrong, pushed, wanted, pair)
