"""Qwen3 as inference engines hold it: q, k and v in one matrix, gate and up in another.

One product reads the input once, where three and two would read it again. The names
are those of vLLM and SGLang: the rows of q, k and v follow each other in
`self_attn.qkv_proj`, those of gate and up in `mlp.gate_up_proj`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Linear, Module
from torch.nn.functional import scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Write each token's position into its q or k."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin


class FusedAttention(Module):
    """Causal attention without a cache."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        rows = [part.out_features for part in parts]
        self.head_dim = attention.head_dim
        self.heads = [count // self.head_dim for count in rows]
        self.qkv_proj = Linear(attention.q_proj.in_features, sum(rows), bias=False)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.o_proj = attention.o_proj

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix what the tokens before each token say into it."""
        heads = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.transpose(1, 2).split(self.heads, dim=1)
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


class FusedMLP(Module):
    """The gated feed-forward layer."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            mlp.hidden_size, 2 * mlp.intermediate_size, bias=False
        )
        self.down_proj = mlp.down_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Work on each token by itself."""
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        result: Tensor = self.down_proj(silu(gate) * up)
        return result


def fuse(model: Any) -> None:
    """Replace the projections of a Qwen3ForCausalLM; the fused ones start at random."""
    for layer in model.model.layers:
        layer.self_attn = FusedAttention(layer.self_attn)
        layer.mlp = FusedMLP(layer.mlp)
