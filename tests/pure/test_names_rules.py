"""Rules of names: what each kind makes of a tensor."""

from __future__ import annotations

from itertools import chain
from time import process_time

import torch

from tests.pure.applying import SENTINEL, counted, fill, raw, same_bytes
from weightsync.names import (
    Entry,
    Fused,
    Part,
    Rule,
    Slice,
    cut,
    fuse,
    optional,
    rename,
    shared,
    stack,
    take,
    translate,
)
from weightsync.spec import Box


def pushed_names(rules: list[Rule], *names: str) -> list[str]:
    translated = translate(rules, dict.fromkeys(names, (2, 3)))
    return [part.name for parts in translated.values() for part in parts]


def test_a_name_that_no_rule_matches_means_itself() -> None:
    part = Part("w", (2, 3), (0, 0), Box((0, 0), (2, 3)), (0, 1))
    scalar = Part("s", (), (), Box((), ()), ())

    assert {"w": (part,), "s": (scalar,)} == translate([], {"w": (2, 3), "s": ()})


def test_placeholders_are_filled_into_the_pushed_name() -> None:
    rules = [
        rename("module.{*path}", "{*path}"),
        rename("h.{layer}.{kind}", "layers.{layer}.mlp.{kind}.{layer}"),
        rename("{*prefix}.gamma", "{*prefix}.weight"),
    ]

    expected = ["a.b.c", "layers.11.mlp.bias.11", "x.y.weight"]
    assert expected == pushed_names(rules, "module.a.b.c", "h.11.bias", "x.y.gamma")


def test_one_part_of_a_path_has_no_dots_and_is_not_empty() -> None:
    rules = [rename("h.{layer}.w", "x"), optional(rename("{*path}.b", "y"))]
    others = ["h.1.2.w", "h..w", "h.w", "H.1.w", "h.1.w.", "oh.1.w", ".b"]

    assert ["x", *others] == pushed_names(rules, "h.1.w", *others)


def test_what_is_special_in_regular_expressions_stands_for_itself() -> None:
    rules = [rename("a.(b)+[{c}]", "x")]

    assert ["x", "a.b[c]"] == pushed_names(rules, "a.(b)+[1]", "a.b[c]")


def test_the_first_rule_that_matches_decides_and_nothing_is_translated_again() -> None:
    rules = [rename("a", "b"), rename("b", "c"), optional(rename("{any}", "d"))]

    assert ["b", "c"] == pushed_names(rules, "a", "b")


def test_gate_and_up_are_cut_by_themselves_before_they_are_fused() -> None:
    gate, up = counted(4, 2), counted(4, 2, start=100)
    filled = [
        fill(
            [
                fuse(
                    "gate_up",
                    [
                        take("gate", Slice(0, rank, 2, size=4)),
                        take("up", Slice(0, rank, 2, size=4)),
                    ],
                )
            ],
            {"gate_up": (4, 2)},
            {"gate": gate, "up": up},
        )["gate_up"].tolist()
        for rank in (0, 1)
    ]

    first = [[0, 1], [2, 3], [100, 101], [102, 103]]
    second = [[4, 5], [6, 7], [104, 105], [106, 107]]
    assert [first, second] == filled


def test_blocks_of_unequal_size_are_fused_one_after_the_other() -> None:
    pushed = {
        "q": counted(8, 4),
        "k": counted(2, 4, start=100),
        "v": counted(2, 4, start=200),
    }
    sources = [take(name, Slice(0, size=len(w))) for name, w in pushed.items()]
    filled = fill([fuse("qkv", sources)], {"qkv": (12, 4)}, pushed)

    assert same_bytes({"qkv": torch.cat(list(pushed.values()))}, filled)


def test_one_rule_fuses_weights_and_biases() -> None:
    pushed = {
        f"{name}.{kind}": counted(*shape, start=100 * index)
        for index, name in enumerate("qk")
        for kind, shape in (("weight", (4, 3)), ("bias", (4,)))
    }
    sources = [take(f"{name}.{{kind}}", Slice(0, 1, 2, size=4)) for name in "qk"]
    shapes = {"qk.weight": (4, 3), "qk.bias": (4,)}
    filled = fill([fuse("qk.{kind}", sources)], shapes, pushed)

    expected = {
        f"qk.{kind}": torch.cat([pushed[f"q.{kind}"][2:], pushed[f"k.{kind}"][2:]])
        for kind in ("weight", "bias")
    }
    assert same_bytes(expected, filled)


def test_a_source_may_be_cut_in_a_dim_that_is_not_fused() -> None:
    pushed = {"a": counted(4, 6), "b": counted(2, 6, start=100)}
    sources = [
        take(name, Slice(0, size=len(w)), Slice(1, 2, 3)) for name, w in pushed.items()
    ]
    filled = fill([fuse("ab", sources)], {"ab": (6, 2)}, pushed)

    assert same_bytes({"ab": torch.cat([w[:, 4:] for w in pushed.values()])}, filled)


def test_parts_of_a_fused_pushed_tensor_are_tensors_here() -> None:
    pushed = {"gate_up": counted(10, 3)}
    rules = [
        Rule("gate", take("gate_up", Slice(0, size=4, whole=10))),
        Rule("up", take("gate_up", Slice(0, start=4, size=6, whole=10))),
    ]
    filled = fill(rules, {"gate": (4, 3), "up": (6, 3)}, pushed)

    whole = pushed["gate_up"]
    assert same_bytes({"gate": whole[:4], "up": whole[4:]}, filled)


def test_a_fused_tensor_is_cut_out_of_a_fused_pushed_one_part_by_part() -> None:
    whole = counted(8, 3)
    filled = []
    for rank in (0, 1):
        sources = [
            take("gate_up", Slice(0, rank, 2, start=start, size=4, whole=8))
            for start in (0, 4)
        ]
        rule = fuse("gate_up", sources)
        filled.append(fill([rule], {"gate_up": (4, 3)}, {"gate_up": whole})["gate_up"])

    assert whole[[0, 1, 4, 5]].tolist() == filled[0].tolist()
    assert whole[[2, 3, 6, 7]].tolist() == filled[1].tolist()


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    pushed = {f"experts.{n}.w": torch.full((2, 2), float(n)) for n in range(12)}
    rules = [
        stack("low", take("experts.{n}.w"), over="n", count=6),
        stack("high", take("experts.{n}.w"), over="n", first=6, count=6),
    ]
    filled = fill(rules, {"low": (6, 2, 2), "high": (6, 2, 2)}, pushed)

    assert (
        list(range(12)) == torch.cat([filled["low"], filled["high"]])[:, 0, 0].tolist()
    )


def test_each_expert_in_a_stack_may_be_fused_and_cut() -> None:
    pushed = {
        f"{layer}.experts.{n}.{name}": counted(4, 3, start=1000 * layer + 100 * n + at)
        for layer in (0, 1)
        for n in range(11)
        for at, name in ((0, "gate"), (50, "up"))
    }
    half = Slice(0, 1, 2, size=4)
    inner = Fused(
        (
            take("{layer}.experts.{n}.gate", half),
            take("{layer}.experts.{n}.up", half),
        )
    )
    rule = stack("{layer}.w13", inner, over="n", first=8)
    filled = fill([rule], {"0.w13": (3, 4, 3), "1.w13": (2, 4, 3)}, pushed)

    expected = {
        f"{layer}.w13": torch.stack(
            [
                torch.cat(
                    [
                        pushed[f"{layer}.experts.{n}.{name}"][2:]
                        for name in ("gate", "up")
                    ]
                )
                for n in range(8, 8 + count)
            ]
        )
        for layer, count in ((0, 3), (1, 2))
    }
    assert same_bytes(expected, filled)


def test_experts_here_are_entries_of_a_stacked_pushed_tensor() -> None:
    whole = counted(12, 4, 3)
    half = Slice(0, start=2, size=2, whole=4)
    rule = Rule("experts.{n}.up", take("gate_up", half, entry=Entry("n", 12)))
    names = [f"experts.{n}.up" for n in (11, 2, 10, 0)]
    filled = fill([rule], dict.fromkeys(names, (2, 3)), {"gate_up": whole})

    expected = {
        name: whole[n, 2:] for name, n in zip(names, (11, 2, 10, 0), strict=True)
    }
    assert same_bytes(expected, filled)


def test_local_numbers_of_experts_here_are_shifted() -> None:
    whole = counted(4, 3)
    rule = Rule("experts.{n}", take("w", entry=Entry("n", 4, first=2)))
    filled = fill([rule], {"experts.0": (3,), "experts.1": (3,)}, {"w": whole})

    assert same_bytes({"experts.0": whole[2], "experts.1": whole[3]}, filled)


def test_an_entry_of_a_vector_is_a_scalar() -> None:
    rule = Rule("scale.{n}", take("scales", entry=Entry("n", 3)))
    filled = fill([rule], {"scale.2": ()}, {"scales": counted(3)})

    assert same_bytes({"scale.2": torch.tensor(2.0)}, filled)


def test_rows_of_padding_belong_to_no_pushed_tensor() -> None:
    whole = counted(5, 2)
    filled = [
        fill(
            [cut("w", dim=0, index=rank, count=4, size=5)], {"w": (3, 2)}, {"w": whole}
        )["w"]
        for rank in range(4)
    ]

    padding = torch.full((7, 2), SENTINEL)
    assert torch.equal(raw(torch.cat([whole, padding])), raw(torch.cat(filled)))


def test_a_rank_of_padding_alone_keeps_an_empty_part() -> None:
    rule = cut("w", dim=0, index=3, count=4, size=5)

    part = Part("w", (5, 2), (5, 0), Box((0, 0), (0, 2)), (0, 1))
    assert {"w": (part,)} == translate([rule], {"w": (3, 2)})


def test_without_a_size_the_slices_are_the_whole() -> None:
    part = Part("x", (2, 12), (0, 8), Box((0, 0), (2, 4)), (0, 1))

    assert {"w": (part,)} == translate(
        [cut("w", "x", dim=1, index=2, count=3)], {"w": (2, 4)}
    )


def test_an_untied_copy_takes_what_another_tensor_takes() -> None:
    rules = [shared(rename("head", "embedding"))]
    pushed = {"embedding": counted(3, 2)}
    shapes = {"embedding": (3, 2), "head": (3, 2)}
    filled = fill(rules, shapes, pushed)

    assert same_bytes(dict.fromkeys(shapes, pushed["embedding"]), filled)


def test_key_value_heads_fewer_than_ranks_lie_on_neighbours() -> None:
    whole = counted(4, 1)
    filled = [
        fill(
            [Rule("k", take("k", Slice(0, rank // 2, 2, size=4)))],
            {"k": (2, 1)},
            {"k": whole},
        )["k"]
        for rank in range(4)
    ]

    assert [0, 1, 0, 1, 2, 3, 2, 3] == list(
        chain.from_iterable(rows.flatten().tolist() for rows in filled)
    )


def test_empty_tensors_and_empty_stacks_have_empty_parts_or_none() -> None:
    translated = translate(
        [stack("s", take("e.{n}"), over="n"), rename("w", "x")],
        {"s": (0, 4), "w": (0, 4)},
    )

    part = Part("x", (0, 4), (0, 0), Box((0, 0), (0, 4)), (0, 1))
    assert {"s": (), "w": (part,)} == translated


def test_seventy_thousand_experts_take_no_more_than_seconds() -> None:
    path = "model.layers.{layer}.mlp.experts."
    rules = [
        Rule(
            f"{path}{{n}}.{name}.weight",
            take(
                f"{path}stack",
                Slice(0, start=at, size=2, whole=6),
                entry=Entry("n", 384),
            ),
        )
        for at, name in ((0, "gate_proj"), (2, "up_proj"), (4, "down_proj"))
    ]
    shapes = {
        f"model.layers.{layer}.mlp.experts.{n}.{name}.weight": (2, 7)
        for layer in range(61)
        for n in range(384)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    before = process_time()
    translated = translate(rules, shapes)
    seconds = process_time() - before

    assert 61 * 384 * 3 == len(translated)
    assert seconds < 5, "about 1 s is usual; comparing all with all would take minutes"
