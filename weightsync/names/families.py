"""Ready rules: Hugging Face checkpoints into the tensors of vLLM and SGLang.

Both engines give their ranks plain tensors under the same names, except that newer
vLLM keeps those of experts one level deeper, in ``experts.routed_experts``.
Attention and dense layers are cut by tensor parallelism in the way of Megatron;
the vocabulary is cut after it was padded. Weights as they are loaded are meant: some
kernels have the engine rearrange them afterwards, for example with quantization.
"""

from __future__ import annotations

from typing import Literal, Protocol

from weightsync.errors import PlanError
from weightsync.names.rules import (
    Fused,
    Rule,
    Slice,
    Source,
    Stacked,
    cut,
    fuse,
    optional,
    shared,
    take,
)

_LAYER = "model.layers.{layer}."
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class DenseConfig(Protocol):
    """What is needed of a transformers config; ``head_dim`` is used where there."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width inside a dense layer."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Heads of the queries."""
        ...

    @property
    def num_key_value_heads(self) -> int | None:
        """Heads of keys and values; None means as many as queries have."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, without padding."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head is the embedding."""
        ...


class MoeConfig(DenseConfig, Protocol):
    """What is needed of the config of a mixture of experts."""

    @property
    def moe_intermediate_size(self) -> int:
        """Width inside one expert."""
        ...

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        ...


def llama(
    config: DenseConfig, *, tensor_parallel: tuple[int, int] = (0, 1)
) -> tuple[Rule, ...]:
    """Make the rules of one engine rank for Llama, Qwen2 and Qwen3.

    ``tensor_parallel`` is the rank and how many there are. Where the embedding is tied,
    ``lm_head.weight`` here takes it too; a trainer may push that name as well, as long
    as it is the same memory there. All rules are optional.

    Raises PlanError for heads or sizes that cannot be cut so.
    """
    _check_rank("tensor", tensor_parallel)
    rules = [
        *_attention(config, tensor_parallel),
        *_mlp(config.intermediate_size, tensor_parallel),
        *_vocabulary(config, tensor_parallel),
    ]
    return tuple([optional(rule) for rule in rules])


qwen2 = qwen3 = llama
"""The same rules: what one family lacks, such as biases, matches nothing there."""


def qwen3_moe(
    config: MoeConfig,
    *,
    tensor_parallel: tuple[int, int] = (0, 1),
    expert_parallel: tuple[int, int] = (0, 1),
    experts: Literal["separate", "stacked"] = "separate",
) -> tuple[Rule, ...]:
    """Make the rules of one engine rank for Qwen3-MoE.

    ``expert_parallel`` is the rank and how many there are, in consecutive experts; the
    first ranks have one more where they cannot have equally many. Experts are cut by
    tensor parallelism too, as far as there are more ranks for that than for experts;
    experts that are cut over data parallel ranks are not meant.
    ``experts`` says how they are pushed: ``separate`` by expert, as in a checkpoint,
    or ``stacked``, as transformers 5 holds them. For the rest see ``llama``.

    Raises PlanError for heads or sizes that cannot be cut so.
    """
    _check_rank("expert", expert_parallel)
    if experts not in {"separate", "stacked"}:
        raise PlanError(f"experts are 'separate' or 'stacked', not {experts!r}")
    _check_rank("tensor", tensor_parallel)
    rank, ranks = tensor_parallel
    if ranks % expert_parallel[1] and expert_parallel[1] % ranks:
        raise PlanError(
            f"of {ranks} tensor parallel and {expert_parallel[1]} expert parallel "
            f"ranks one number must divide the other"
        )
    count = max(1, ranks // expert_parallel[1])
    gate_up, down = (_stacked if experts == "stacked" else _separate)(
        config, _own_experts(config.num_experts, expert_parallel), (rank % count, count)
    )
    rules = [
        Rule(f"{_LAYER}mlp.experts.{level}{name}", value)
        for level in ("", "routed_experts.")
        for name, value in (("w13_weight", gate_up), ("w2_weight", down))
    ]
    return (
        *[optional(rule) for rule in rules],
        *llama(config, tensor_parallel=tensor_parallel),
    )


def _check_rank(what: str, parallel: tuple[int, int]) -> None:
    rank, ranks = parallel
    if not 0 <= rank < ranks:
        raise PlanError(f"{what} parallel: there is no rank {rank} of {ranks}")


def _attention(config: DenseConfig, parallel: tuple[int, int]) -> list[Rule]:
    rank, ranks = parallel
    heads = config.num_attention_heads
    pairs = config.num_key_value_heads
    pairs = heads if pairs is None else pairs
    width = getattr(config, "head_dim", None)
    width = config.hidden_size // heads if width is None else width
    count = min(ranks, pairs)
    if heads % ranks or ranks % count or pairs % count:
        raise PlanError(
            f"{heads} heads with {pairs} key/value heads cannot be spread evenly over "
            f"{ranks} tensor parallel ranks"
        )
    # With fewer key/value heads than ranks, neighbours hold the same one.
    pair = Slice(0, rank // (ranks // count), count, size=pairs * width)
    sources = [
        take(f"{_LAYER}self_attn.q_proj.{{kind}}", _cut(0, heads * width, parallel)),
        take(f"{_LAYER}self_attn.k_proj.{{kind}}", pair),
        take(f"{_LAYER}self_attn.v_proj.{{kind}}", pair),
    ]
    return [
        fuse(f"{_LAYER}self_attn.qkv_proj.{{kind}}", sources),
        cut(f"{_LAYER}self_attn.o_proj.weight", dim=1, index=rank, count=ranks),
    ]


def _mlp(size: int, parallel: tuple[int, int]) -> list[Rule]:
    rank, ranks = parallel
    half = _cut(0, size, parallel)
    sources = [take(f"{_LAYER}mlp.{name}.{{kind}}", half) for name in _GATE_UP]
    return [
        fuse(f"{_LAYER}mlp.gate_up_proj.{{kind}}", sources),
        cut(f"{_LAYER}mlp.down_proj.weight", dim=1, index=rank, count=ranks),
    ]


_GATE_UP = ("gate_proj", "up_proj")


def _vocabulary(config: DenseConfig, parallel: tuple[int, int]) -> list[Rule]:
    rank, ranks = parallel
    size = config.vocab_size
    embedding = cut(_EMBEDDING, dim=0, index=rank, count=ranks, size=size)
    if config.tie_word_embeddings:
        head = cut(_HEAD, _EMBEDDING, dim=0, index=rank, count=ranks, size=size)
        return [embedding, shared(head)]
    return [embedding, cut(_HEAD, dim=0, index=rank, count=ranks, size=size)]


def _own_experts(experts: int, parallel: tuple[int, int]) -> tuple[int, int]:
    """Return the first expert of a rank, and how many it has."""
    rank, ranks = parallel
    each, more = divmod(experts, ranks)
    return rank * each + min(rank, more), each + (rank < more)


def _separate(
    config: MoeConfig, own: tuple[int, int], parallel: tuple[int, int]
) -> tuple[Stacked, Stacked]:
    first, count = own
    size = config.moe_intermediate_size
    path = f"{_LAYER}mlp.experts.{{expert}}."
    half = _cut(0, size, parallel)
    gate_up = Fused(tuple([take(f"{path}{name}.weight", half) for name in _GATE_UP]))
    down = take(f"{path}down_proj.weight", _cut(1, size, parallel))
    return (
        Stacked(gate_up, "expert", first, count),
        Stacked(down, "expert", first, count),
    )


def _stacked(
    config: MoeConfig, own: tuple[int, int], parallel: tuple[int, int]
) -> tuple[Fused, Source]:
    first, count = own
    size = config.moe_intermediate_size
    rank, ranks = parallel
    mine = Slice(0, start=first, size=count, whole=config.num_experts)
    halves = [
        Slice(1, rank, ranks, start=start, size=size, whole=2 * size)
        for start in (0, size)
    ]
    path = f"{_LAYER}mlp.experts."
    return (
        Fused(tuple([take(f"{path}gate_up_proj", mine, half) for half in halves]), 1),
        take(f"{path}down_proj", mine, _cut(2, size, parallel)),
    )


def _cut(dim: int, size: int, parallel: tuple[int, int]) -> Slice:
    rank, ranks = parallel
    return Slice(dim, rank, ranks, size=size)
