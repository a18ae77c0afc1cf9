"""Names: wrapper prefixes, and rules that say what pushed tensors a tensor is."""

from __future__ import annotations

from weightsync.names.families import (
    DenseConfig,
    MoeConfig,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
)
from weightsync.names.parts import Part
from weightsync.names.rules import (
    Entry,
    Fused,
    Rule,
    Slice,
    Source,
    Stacked,
    cut,
    fuse,
    optional,
    rename,
    shared,
    stack,
    take,
)
from weightsync.names.translate import translate
from weightsync.names.wrappers import canonical, canonical_names, ignored

__all__ = [
    "DenseConfig",
    "Entry",
    "Fused",
    "MoeConfig",
    "Part",
    "Rule",
    "Slice",
    "Source",
    "Stacked",
    "canonical",
    "canonical_names",
    "cut",
    "fuse",
    "ignored",
    "llama",
    "optional",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "rename",
    "shared",
    "stack",
    "take",
    "translate",
]
