"""A mixture of experts of a trillion parameters, as a list of tensors and layouts.

The shapes are those that Moonshot AI published for Kimi-K2 in its ``config.json``, the
names those of its checkpoint, which has the layout of DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weightsync.cli.layouts import make_layout
from weightsync.cli.models import ModelTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.cli.layouts import Layout

DTYPE: Final = "bfloat16"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MoeModel:
    """The numbers of ``config.json``, by the names that they have there."""

    num_hidden_layers: int = 61
    first_k_dense_replace: int = 1
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = 163840

    def tensors(self) -> tuple[ModelTensor, ...]:
        """Every tensor of the checkpoint, unquantized."""
        return tuple(self._tensors())

    def _tensors(self) -> Iterator[ModelTensor]:
        embedding = self.vocab_size, self.hidden_size
        yield ModelTensor("model.embed_tokens.weight", DTYPE, embedding)
        for layer in range(self.num_hidden_layers):
            shapes = {**self._norms(), **self._attention()}
            if layer < self.first_k_dense_replace:
                shapes |= self._mlp("mlp", self.intermediate_size)
            else:
                shapes |= self._experts()
            for name, shape in shapes.items():
                # The router's bias is kept in full precision.
                dtype = "float32" if name.endswith("_bias") else DTYPE
                yield ModelTensor(f"model.layers.{layer}.{name}", dtype, shape)
        yield ModelTensor("model.norm.weight", DTYPE, (self.hidden_size,))
        yield ModelTensor("lm_head.weight", DTYPE, embedding)

    def _norms(self) -> Shapes:
        return {
            "input_layernorm.weight": (self.hidden_size,),
            "post_attention_layernorm.weight": (self.hidden_size,),
        }

    def _attention(self) -> Shapes:
        heads, rope = self.num_attention_heads, self.qk_rope_head_dim
        q = heads * (self.qk_nope_head_dim + rope)
        kv = heads * (self.qk_nope_head_dim + self.v_head_dim)
        shapes = {
            "q_a_proj": (self.q_lora_rank, self.hidden_size),
            "q_a_layernorm": (self.q_lora_rank,),
            "q_b_proj": (q, self.q_lora_rank),
            "kv_a_proj_with_mqa": (self.kv_lora_rank + rope, self.hidden_size),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "kv_b_proj": (kv, self.kv_lora_rank),
            "o_proj": (self.hidden_size, heads * self.v_head_dim),
        }
        return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}

    def _mlp(self, name: str, size: int) -> Shapes:
        return {
            f"{name}.gate_proj.weight": (size, self.hidden_size),
            f"{name}.up_proj.weight": (size, self.hidden_size),
            f"{name}.down_proj.weight": (self.hidden_size, size),
        }

    def _experts(self) -> Shapes:
        shapes: Shapes = {
            "mlp.gate.weight": (self.n_routed_experts, self.hidden_size),
            "mlp.gate.e_score_correction_bias": (self.n_routed_experts,),
        }
        size = self.moe_intermediate_size
        shapes |= self._mlp("mlp.shared_experts", self.n_shared_experts * size)
        for expert in range(self.n_routed_experts):
            shapes |= self._mlp(f"mlp.experts.{expert}", size)
        return shapes


def trainers(ranks: int, expert_parallel: int) -> Layout:
    """FSDP over expert parallel: each expert is cut over the ranks of its group only.

    Everything else is cut over all ranks.
    """
    experts = {
        "names": "*.mlp.experts.<expert>.*",
        "assign": {"ep": "expert"},
        "shard": {"fsdp": 0},
    }
    mesh = {"ep": expert_parallel, "fsdp": ranks // expert_parallel}
    rest = {"names": "*", "shard": {"ep+fsdp": 0}}
    return make_layout({"mesh": mesh, "tensors": [experts, rest]}, "trainers")


def generators(expert_parallel: int, tensor_parallel: int) -> Layout:
    """Experts are spread, each is cut; the rest is cut, and copied to each group."""
    columns = ["*.gate_proj.weight", "*.up_proj.weight"]
    heads = ["*.q_b_proj.weight", "*.kv_b_proj.weight"]
    vocabulary = ["model.embed_tokens.weight", "lm_head.weight"]
    experts = [f"*.mlp.experts.<expert>{name[1:]}" for name in columns]
    assign = {"ep": "expert"}
    rules = [
        {"names": experts, "assign": assign, "shard": {"tp": 0}},
        {
            "names": "*.mlp.experts.<expert>.down_proj.weight",
            "assign": assign,
            "shard": {"tp": 1},
        },
        {"names": [*columns, *heads, *vocabulary], "shard": {"tp": 0}},
        {"names": ["*.down_proj.weight", "*.o_proj.weight"], "shard": {"tp": 1}},
    ]
    mesh = {"ep": expert_parallel, "tp": tensor_parallel}
    return make_layout({"mesh": mesh, "tensors": rules}, "generators")
