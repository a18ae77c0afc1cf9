"""Names: wrapper prefixes, collisions, patterns."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from weightsync.errors import PlanError
from weightsync.names import canonical, canonical_names, ignored


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.0.weight", "0.weight"),
        ("0._checkpoint_wrapped_module.weight", "0.weight"),
        ("_fsdp_wrapped_module.0.weight", "0.weight"),
        ("a._orig_mod._fsdp_wrapped_module.b._orig_mod.c", "a.b.c"),
        ("_orig_mod._orig_mod.w", "w"),
        ("module._orig_mod.w", "module.w"),
    ],
)
def test_wrapper_prefixes_are_removed_anywhere_in_a_path(
    name: str, expected: str
) -> None:
    assert expected == canonical(name)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.module.weight",
        "module.w",
        "layer.base_layer.weight",
        "my_orig_mod.w",
        "a_fsdp_wrapped_module.w",
        "_orig_mod_.w",
        "_orig_mod",
        "a._orig_mod",
        "",
    ],
)
def test_nothing_else_is_removed(name: str) -> None:
    assert name == canonical(name)


def test_names_of_really_wrapped_modules_become_those_of_the_plain_one() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled = torch.compile(plain)
    assert isinstance(compiled, torch.nn.Module)
    wrapped = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)))
    names = ["0.weight", "0.bias"]

    assert names == list(canonical_names(compiled.state_dict()).values())
    assert names == list(canonical_names(dict(compiled.named_parameters())).values())
    assert names == list(canonical_names(dict(wrapped.named_parameters())).values())


def test_originals_are_mapped_in_order() -> None:
    names = ["b", "_orig_mod.a", "c._orig_mod.d"]

    expected = [("b", "b"), ("_orig_mod.a", "a"), ("c._orig_mod.d", "c.d")]
    assert expected == list(canonical_names(names).items())


def test_two_names_that_become_one_are_both_named() -> None:
    with pytest.raises(PlanError, match=r"'_orig_mod\.w' and 'w' both become 'w'"):
        canonical_names(["_orig_mod.w", "w"])


def test_a_pattern_is_matched_as_a_whole_and_minds_case() -> None:
    assert ignored("layers.3.rope", ["x", "*.rope"])
    assert ignored("layers.3.rope", ["layers.[0-9].rope"])
    assert not ignored("layers.3.rope", ["rope", "*.ROPE"])
    assert not ignored("layers.3.rope", [])
