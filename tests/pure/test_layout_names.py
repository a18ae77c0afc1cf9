"""What rules make of the entries of a rank: pieces of pushed tensors, as views."""

from __future__ import annotations

import pytest
import torch

from weightsync.errors import PlanError, UnsupportedError
from weightsync.layout import Shard, capture, register
from weightsync.names import Slice, fuse, rename, shared, stack, take
from weightsync.spec import Box, TensorSpec

QKV = [
    fuse(
        "{layer}.qkv",
        [
            take("{layer}.q", Slice(0, size=4)),
            take("{layer}.k", Slice(0, size=2)),
            take("{layer}.v", Slice(0, size=2)),
        ],
    )
]


def held(specs: tuple[TensorSpec, ...]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(spec.name, spec.shape, str(spec.box)) for spec in specs]


def test_a_fused_tensor_is_several_pieces_of_one_memory() -> None:
    fused = torch.zeros(8, 3)
    registered = register({"0.qkv": fused}, names=QKV)
    for piece, value in zip(registered.tensors, (1.0, 2.0, 3.0), strict=True):
        piece.fill_(value)

    expected = [
        ("0.q", (4, 3), "[0:4, 0:3]"),
        ("0.k", (2, 3), "[0:2, 0:3]"),
        ("0.v", (2, 3), "[0:2, 0:3]"),
    ]
    assert expected == held(registered.manifest.tensors)
    assert [1.0] * 4 + [2.0] * 2 + [3.0] * 2 == fused[:, 0].tolist()
    assert {"0.qkv": fused} == dict(registered.entries)


def test_a_shard_of_a_fused_tensor_has_the_parts_that_it_meets() -> None:
    shard = Shard(torch.zeros(3, 3), global_shape=(8, 3), offsets=(3, 0))
    registered = register({"0.qkv": shard}, names=QKV)

    expected = [("0.q", (4, 3), "[3:4, 0:3]"), ("0.k", (2, 3), "[0:2, 0:3]")]
    assert expected == held(registered.manifest.tensors)


def test_stacked_tensors_are_pieces_with_a_dim_less() -> None:
    experts = torch.arange(12.0).view(3, 2, 2)
    captured = capture(
        {"experts": experts}, names=[stack("experts", take("{e}.w"), over="e")]
    )

    assert ("0.w", "1.w", "2.w") == captured.manifest.names
    assert [experts[i].tolist() for i in range(3)] == [
        tensor.tolist() for tensor in captured.tensors
    ]
    assert {experts.untyped_storage().data_ptr()} == {
        tensor.untyped_storage().data_ptr() for tensor in captured.tensors
    }


def test_a_name_is_known_even_where_a_rank_holds_nothing_of_the_tensor() -> None:
    empty = Shard(torch.zeros(0, 3), global_shape=(8, 3), offsets=(8, 0))
    entries = {"a": empty, "b": empty, "0.qkv": empty, "c": torch.zeros(0)}
    captured = capture(entries, names=[rename("a", "d"), *QKV])

    expected = [
        ("d", (8, 3), "[8:8, 0:3]"),
        ("b", (8, 3), "[8:8, 0:3]"),
        ("c", (0,), "[0:0]"),
    ]
    assert expected == held(captured.manifest.tensors)


def test_a_shared_rule_ties_what_is_one_memory() -> None:
    weight = torch.zeros(4, 2)
    rules = [shared(rename("head", "embed"))]
    one = register({"embed": weight, "head": weight}, names=rules)
    two = register({"embed": weight, "head": weight.clone()}, names=rules)

    assert [None, 0] == [spec.tied for spec in one.manifest.tensors]
    assert [None, None] == [spec.tied for spec in two.manifest.tensors]
    assert ("embed", "embed") == two.manifest.names


def test_errors_name_the_entry_and_the_pushed_tensor() -> None:
    memory = torch.zeros(9, 3)
    with pytest.raises(PlanError, match=r"'0\.qkv' \(as '0\.v'\) and '0\.w' share"):
        register({"0.qkv": memory[:8], "0.w": memory[7:]}, names=QKV[:1])
    conjugate = torch.zeros(8, 2, dtype=torch.complex64).conj()
    with pytest.raises(UnsupportedError, match=r"'0\.qkv' \(as '0\.q'\): cannot"):
        register({"0.qkv": conjugate}, names=QKV)
    with pytest.raises(UnsupportedError, match=r"'0\.qkv'.*'meta'"):
        capture({"0.qkv": torch.zeros(8, 3, device="meta")}, names=QKV)


def test_rules_speak_of_canonical_names() -> None:
    captured = capture({"_orig_mod.a": torch.zeros(2)}, names=[rename("a", "b")])

    assert ("b",) == captured.manifest.names


def test_one_rule_is_no_list_of_rules() -> None:
    rules: object = rename("a", "b")
    with pytest.raises(PlanError, match="names takes rules, in a list"):
        capture({"a": torch.zeros(2)}, names=rules)  # type: ignore[arg-type] # wrong on purpose


# Pairs


def test_pairs_are_a_state_dict_too() -> None:
    layer = torch.nn.Linear(3, 2)
    captured = capture(layer.named_parameters())

    assert ("weight", "bias") == captured.manifest.names
    assert layer.weight.data_ptr() == captured.tensors[0].data_ptr()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("w", torch.ones(1)), ("w", torch.ones(1))], "'w': comes twice"),
        ([("w", torch.ones(1), 3)], "among the pairs is a tuple"),
        ([torch.ones(1)], "among the pairs is a Tensor"),
        (torch.ones(2), "not a Tensor"),
        ("state.pt", "not a str"),
        (torch.nn.Linear(1, 1), "not a Linear"),
        ([(1, torch.ones(1))], "a name is a str, not the int 1"),
    ],
)
def test_what_is_neither_a_mapping_nor_pairs_is_refused(
    pairs: object, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        capture(pairs)  # type: ignore[arg-type] # wrong on purpose


# Memory that is gone


def test_freed_memory_is_refused_wherever_a_tensor_begins_in_it() -> None:
    memory = torch.ones(8, 2)
    views = {"all": memory, "rows": memory[4:], "columns": memory[:, 1]}
    memory.untyped_storage().resize_(16)
    for name, view in views.items():
        with pytest.raises(UnsupportedError, match=f"'{name}': has no memory"):
            capture({name: view})

    assert Box((0, 0), (2, 2)) == capture({"w": memory[:2]}).manifest.tensors[0].box
