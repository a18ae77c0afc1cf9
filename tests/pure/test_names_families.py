"""Ready rules, with tiny models of the real transformers classes.

What each rank of an engine holds is made here by hand: for every layer the rows and
columns that the rank's loader would copy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.pure.applying import SENTINEL, fill, same_bytes
from weightsync.errors import PlanError
from weightsync.names import llama, qwen3_moe, translate

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 70,  # padded to 128, so the last of four ranks has only padding
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def build(family: str, **options: Any) -> tuple[Any, State]:
    """Make a model of a real class and number its parameters' elements through."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.arange(start, start + parameter.numel())
            parameter.copy_(numbers.reshape(parameter.shape))
            start += parameter.numel()
    return config, {name: t.detach() for name, t in model.state_dict().items()}


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    each = tensor.shape[0] // ranks
    return tensor[rank * each : (rank + 1) * each]


def columns(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return rows(tensor.movedim(-1, 0), rank, ranks).movedim(0, -1)


def vocabulary(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    padded = torch.full((-(-tensor.shape[0] // 64) * 64, tensor.shape[1]), SENTINEL)
    padded[: tensor.shape[0]] = tensor
    return rows(padded, rank, ranks)


def heads(tensor: torch.Tensor, count: int, rank: int, ranks: int) -> torch.Tensor:
    """Take the heads of a rank; neighbours have the same one where there are few."""
    by_head = tensor.reshape(count, -1, *tensor.shape[1:])
    own = max(1, count // ranks)
    first = rank * count // ranks
    return by_head[first : first + own].flatten(0, 1)


def attention(state: State, config: Any, layer: str, rank: int, ranks: int) -> State:
    made: State = {}
    path = f"{layer}.self_attn"
    counts = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    for kind in ("weight", "bias"):
        if f"{path}.q_proj.{kind}" in state:
            made[f"{path}.qkv_proj.{kind}"] = torch.cat(
                [
                    heads(state[f"{path}.{name}.{kind}"], count, rank, ranks)
                    for name, count in counts.items()
                ]
            )
    made[f"{path}.o_proj.weight"] = columns(state[f"{path}.o_proj.weight"], rank, ranks)
    for name in ("o_proj.bias", "q_norm.weight", "k_norm.weight"):
        if f"{path}.{name}" in state:
            made[f"{path}.{name}"] = state[f"{path}.{name}"]
    return made


def dense(state: State, layer: str, rank: int, ranks: int) -> State:
    path = f"{layer}.mlp"
    made = {
        f"{path}.down_proj.weight": columns(
            state[f"{path}.down_proj.weight"], rank, ranks
        )
    }
    for kind in ("weight", "bias"):
        if f"{path}.gate_proj.{kind}" in state:
            gate, up = (
                state[f"{path}.{name}.{kind}"] for name in ("gate_proj", "up_proj")
            )
            made[f"{path}.gate_up_proj.{kind}"] = torch.cat(
                [rows(gate, rank, ranks), rows(up, rank, ranks)]
            )
    if f"{path}.down_proj.bias" in state:
        made[f"{path}.down_proj.bias"] = state[f"{path}.down_proj.bias"]
    return made


def mixture(
    state: State, layer: str, own: range, parallel: tuple[int, int], level: str
) -> State:
    """Take experts out of the stacks in which transformers 5 holds them."""
    path = f"{layer}.mlp"
    made = {f"{path}.gate.weight": state[f"{path}.gate.weight"]}
    pairs, downs = [], []
    for expert in own:
        gate, up = state[f"{path}.experts.gate_up_proj"][expert].chunk(2)
        pairs.append(torch.cat([rows(gate, *parallel), rows(up, *parallel)]))
        downs.append(columns(state[f"{path}.experts.down_proj"][expert], *parallel))
    made[f"{path}.experts.{level}w13_weight"] = torch.stack(pairs)
    made[f"{path}.experts.{level}w2_weight"] = torch.stack(downs)
    return made


def engine(
    state: State,
    config: Any,
    rank: int,
    ranks: int,
    *,
    own: range = range(0),
    experts_parallel: tuple[int, int] = (0, 1),
    level: str = "",
) -> State:
    """Make what one rank of an engine holds."""
    made = {"model.norm.weight": state["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made[name] = vocabulary(state[name], rank, ranks)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            made[f"{layer}.{norm}"] = state[f"{layer}.{norm}"]
        made |= attention(state, config, layer, rank, ranks)
        if f"{layer}.mlp.experts.gate_up_proj" in state:
            made |= mixture(state, layer, own, experts_parallel, level)
        else:
            made |= dense(state, layer, rank, ranks)
    return made


def by_expert(state: State) -> State:
    """Name each expert's tensors as a checkpoint does."""
    pushed: State = {}
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            pushed[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = {"down_proj": own}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
            for part, value in parts.items():
                pushed[f"{path}.{expert}.{part}.weight"] = value
    return pushed


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
        ("Qwen2", {"num_key_value_heads": 4}),
        ("Qwen2", {"num_key_value_heads": 1}),
        ("Qwen3", {"head_dim": 8}),
        ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_every_rank_of_a_dense_engine_gets_the_bytes_of_its_own_cut(
    family: str, options: dict[str, Any], ranks: int
) -> None:
    config, state = build(family, **options)
    used: set[str] = set()
    for rank in range(ranks):
        expected = engine(state, config, rank, ranks)
        rules = llama(config, tensor_parallel=(rank, ranks))
        for parts in translate(rules, shapes_of(expected)).values():
            used |= {part.name for part in parts}

        assert same_bytes(expected, fill(rules, shapes_of(expected), state))
    unused = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert state.keys() - unused == used


@pytest.mark.parametrize("experts", ["separate", "stacked"])
@pytest.mark.parametrize(
    ("ranks", "expert_ranks", "level"),
    [
        (1, 1, ""),
        (2, 1, "routed_experts."),  # newer vLLM
        (4, 1, ""),
        (1, 2, ""),  # data parallel attention
        (2, 2, "routed_experts."),  # whole experts, as vLLM spreads them
        (4, 2, ""),  # halves of experts, as SGLang spreads them
    ],
)
def test_every_rank_of_a_mixture_of_experts_gets_the_bytes_of_its_own_cut(
    ranks: int, expert_ranks: int, level: str, experts: Any
) -> None:
    config, state = build("Qwen3Moe", **EXPERTS)
    pushed = by_expert(state) if experts == "separate" else state
    own = [range(5)] if expert_ranks == 1 else [range(3), range(3, 5)]
    share = max(1, ranks // expert_ranks)
    used: set[str] = set()
    for rank in range(max(ranks, expert_ranks)):
        tensor_rank, expert_rank = rank % ranks, rank // share
        expert_rank %= expert_ranks
        expected = engine(
            state,
            config,
            tensor_rank,
            ranks,
            own=own[expert_rank],
            experts_parallel=(rank % share, share),
            level=level,
        )
        rules = qwen3_moe(
            config,
            tensor_parallel=(tensor_rank, ranks),
            expert_parallel=(expert_rank, expert_ranks),
            experts=experts,
        )
        for parts in translate(rules, shapes_of(expected)).values():
            used |= {part.name for part in parts}

        assert same_bytes(expected, fill(rules, shapes_of(expected), pushed))
    assert pushed.keys() == used


def test_experts_are_pushed_under_the_names_that_transformers_saves(
    tmp_path: Path,
) -> None:
    import transformers
    from safetensors.torch import load_file

    config, state = build("Qwen3Moe", **EXPERTS)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)

    assert same_bytes(load_file(tmp_path / "model.safetensors"), by_expert(state))


def config_of(**options: Any) -> Any:
    return SimpleNamespace(**SIZES | {"tie_word_embeddings": False} | EXPERTS | options)


@pytest.mark.parametrize(
    ("options", "parallel", "fault"),
    [
        ({}, (0, 3), "4 heads with 2 key/value heads .* 3 tensor parallel ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            (0, 2),
            "6 heads with 3",
        ),
        ({"intermediate_size": 7}, (0, 2), "size 7 cannot be cut into 2 equal slices"),
        ({}, (2, 2), "tensor parallel: there is no rank 2 of 2"),
        ({}, (-1, 2), "tensor parallel: there is no rank -1 of 2"),
        ({}, (0, 0), "tensor parallel: there is no rank 0 of 0"),
    ],
)
def test_what_cannot_be_cut_evenly_is_an_error(
    options: dict[str, Any], parallel: tuple[int, int], fault: str
) -> None:
    with pytest.raises(PlanError, match=fault):
        llama(config_of(**options), tensor_parallel=parallel)


def test_experts_that_cannot_be_cut_or_named_are_errors() -> None:
    config = config_of()

    with pytest.raises(PlanError, match="expert parallel: there is no rank 2 of 2"):
        qwen3_moe(config, expert_parallel=(2, 2))
    with pytest.raises(
        PlanError, match="experts are 'separate' or 'stacked', not 'no'"
    ):
        qwen3_moe(config, experts="no")  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(PlanError, match="size 13 cannot be cut into 2 equal slices"):
        qwen3_moe(config_of(moe_intermediate_size=13), tensor_parallel=(0, 2))


def test_a_rank_that_holds_other_experts_than_its_rules_say_is_an_error() -> None:
    here = {"model.layers.1.mlp.experts.w13_weight": (3, 24, 16)}

    with pytest.raises(PlanError, match=r"2 of \{expert\} are stacked, not 3"):
        translate(qwen3_moe(config_of(), expert_parallel=(1, 2)), here)


def test_as_many_key_value_heads_as_query_heads_need_not_be_said() -> None:
    config = config_of(num_key_value_heads=None, head_dim=None)
    here = {"model.layers.0.self_attn.qkv_proj.weight": (24, 16)}
    parts = translate(llama(config, tensor_parallel=(1, 2)), here)

    expected = [(16, 16)] * 3
    assert expected == [part.shape for part in parts.popitem()[1]]
