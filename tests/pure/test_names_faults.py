"""Rules of names that cannot be meant: errors that name the rule and what it met."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.errors import PlanError
from weightsync.names import (
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
    translate,
)

if TYPE_CHECKING:
    from weightsync.names.rules import Value

Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (Source("x.{other}"), r"'x\.\{other\}' needs \{other\}, which nothing"),
        (take("x", entry=Entry("n", 4)), r"'x' needs \{n\}, which nothing stands for"),
        (Stacked(take("x.{n}"), "layer"), r"\{layer\} is stacked"),
        (Stacked(take("x.{n}"), "n", -1), r"the first of \{n\} cannot be -1"),
        (Fused(()), "nothing is fused"),
        (Fused((take("x"),)), "'x': its size in dim 0 must be given"),
        (Fused((take("x", Slice(0, size=4)),), 1), "its size in dim 1 must be given"),
        (Fused((take("x", Slice(0, size=4)),), -1), "its size in dim -1 must be given"),
        (
            Fused((take("x", Slice(0, size=4, padded=True)),)),
            "its size in dim 0 must be given",
        ),
        (take("x", Slice(-1)), "'x': dim -1: dims are counted from 0 up"),
        (take("x", Slice(1), Slice(1)), "'x': dim 1: is cut twice"),
        (take("x", Slice(0, 2, 2)), "dim 0: there is no slice 2 of 2"),
        (take("x", Slice(0, -1, 2)), "there is no slice -1 of 2"),
        (take("x", Slice(0, 0, 0)), "there is no slice 0 of 0"),
        (take("x", Slice(0, start=1)), "start, whole and padded need a size"),
        (take("x", Slice(0, whole=4)), "start, whole and padded need a size"),
        (take("x", Slice(0, padded=True)), "start, whole and padded need a size"),
        (take("x", Slice(0, start=3, size=2, whole=4)), "3:5 is not inside size 4"),
        (take("x", Slice(0, start=-1, size=2)), "-1:1 is not inside size 1"),
        (take("x", Slice(0, size=-2)), "0:-2 is not inside size -2"),
        (take("x", Slice(0, 0, 3, size=8)), "size 8 cannot be cut into 3 equal slices"),
        (take("x", entry=Entry("layer", 0)), "entries from 0 on of 0 are none"),
        (take("x", entry=Entry("layer", 2, -1)), "entries from -1 on of 2 are none"),
    ],
)
def test_a_rule_that_can_fit_no_tensor_is_not_made(value: Value, fault: str) -> None:
    with pytest.raises(PlanError, match=rf"^rule 'w\.\{{layer\}}': .*{fault}"):
        Rule("w.{layer}", value)


@pytest.mark.parametrize(
    ("here", "pushed", "fault"),
    [
        ("{x}.{x}", "y", "each placeholder may occur once"),
        ("{x}.{*x}", "y", "each placeholder may occur once"),
        ("{}", "y", "braces hold a name"),
        ("{1}", "y", "braces hold a name"),
        ("a{", "y", "braces hold a name"),
        ("{**x}", "y", "braces hold a name"),
        ("{x}", "y}", "braces hold a name"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_named(
    here: str, pushed: str, fault: str
) -> None:
    with pytest.raises(PlanError, match=fault):
        rename(here, pushed)


HALVES = [take("a", Slice(0, size=4)), take("b", Slice(0, 0, 2, size=6))]


@pytest.mark.parametrize(
    ("rule", "shape", "fault"),
    [
        (
            fuse("w", HALVES),
            (8, 2),
            r"dim 0 has size 8, but what is fused there, 'a', 'b', has 4 \+ 3 = 7",
        ),
        (
            fuse("w", [take("a", Slice(1, size=4))], dim=1),
            (4,),
            "dim 1 is out of range",
        ),
        (cut("w", dim=1, index=0, count=2), (4,), "'w': dim 1 is out of range"),
        (
            Rule("w", take("a", Slice(0, 1, 2, size=6))),
            (4,),
            "'a': dim 0 has size 4, which is not slice 1 of 2 of 6",
        ),
        (
            cut("w", dim=0, index=1, count=2, size=9),
            (4,),
            "'w': dim 0 has size 4, which is not slice 1 of 2 of 9",
        ),
        (
            stack("w", take("e.{n}"), over="n"),
            (),
            "a tensor without dims holds no stack",
        ),
        (
            stack("w", take("e.{n}"), over="n", count=3),
            (4, 2),
            r"3 of \{n\} are stacked, not 4",
        ),
        (
            stack("w", take("e.{n}", Slice(1, size=4)), over="n"),
            (4, 2),
            r"'e\.\{n\}': dim 1 is out of range",
        ),
    ],
)
def test_a_rule_that_does_not_fit_names_itself_the_tensor_and_its_shape(
    rule: Rule, shape: tuple[int, ...], fault: str
) -> None:
    with pytest.raises(PlanError, match=rf"^rule 'w': tensor 'w' of shape .*{fault}"):
        translate([rule], {"w": shape})


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("experts.4", "'w': entry 4 is not among its 4"),
        ("experts.shared", r"\{n\} is 'shared', which is no number"),
        ("experts.-1", r"\{n\} is '-1', which is no number"),
        ("experts.²", "which is no number"),
    ],
)
def test_an_entry_that_is_not_there_is_named(name: str, fault: str) -> None:
    rule = Rule("experts.{n}", take("w", entry=Entry("n", 4)))

    with pytest.raises(PlanError, match=fault):
        translate([rule], {name: (2,)})


def test_rules_that_decide_for_nothing_are_all_named() -> None:
    rules = [rename("{*any}", "x.{*any}"), rename("a", "b"), rename("c.{n}", "d.{n}")]

    with pytest.raises(PlanError, match=r"no tensor here: 'a', 'c\.\{n\}'; .*optional"):
        translate(rules, {"a": (2,)})


def test_an_optional_rule_may_decide_for_nothing() -> None:
    assert {} == translate([optional(rename("a", "b"))], {})


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(PlanError, match=r"names takes rules, not tuple \('a', 'b'\)"):
        translate([("a", "b")], {"a": (2,)})  # type: ignore[list-item] # wrong on purpose


@pytest.mark.parametrize(
    ("rules", "shapes", "fault"),
    [
        (
            [rename("a", "b")],
            {"a": (2,), "b": (2,)},
            r"'a' and 'b' .* 'b', \[0:2\] and",
        ),
        (
            [rename("{x}", "w")],
            {"a": (), "b": ()},
            r"'a' and 'b' .* 'w', \[\] and \[\]",
        ),
        (
            [fuse("w", [take("x", Slice(0, size=2)), take("x", Slice(0, size=2))])],
            {"w": (4,)},
            r"'w' and 'w' .* 'x', \[0:2\] and \[0:2\]",
        ),
        (
            [
                Rule("a", take("x", Slice(0, size=3, whole=4))),
                Rule("b", take("x", Slice(0, start=2, size=2, whole=4))),
            ],
            {"b": (2, 5), "a": (3, 5)},
            r"'a' and 'b' .* 'x', \[0:3, 0:5\] and \[2:4, 0:5\]",
        ),
        (
            [Rule("e.{n}", take("x", entry=Entry("n", 9)))],
            {"e.1": (2,), "e.2": (2,), "e.01": (2,)},
            r"'e\.1' and 'e\.01' .* 'x', \[1:2, 0:2\] and \[1:2, 0:2\]",
        ),
    ],
)
def test_tensors_that_take_the_same_elements_are_named_with_their_boxes(
    rules: list[Rule], shapes: Shapes, fault: str
) -> None:
    with pytest.raises(PlanError, match=f"{fault}.*must be shared"):
        translate(rules, shapes)


def test_two_tensors_that_share_need_one_shared_rule_and_three_need_two() -> None:
    shapes = {"a": (2,), "b": (2,), "c": (2,)}
    one = [shared(rename("b", "a")), rename("c", "a")]
    two = [shared(rename("b", "a")), shared(rename("c", "a"))]

    assert ["a", "a", "a"] == [part.name for (part,) in translate(two, shapes).values()]
    with pytest.raises(PlanError, match="'a' and 'c' take the same elements"):
        translate(one, shapes)


def test_tensors_that_disagree_about_a_global_shape_are_named_with_their_shapes() -> (
    None
):
    rules = [
        Rule("a", take("x", Slice(0, size=2, whole=4))),
        Rule("b", take("x", Slice(0, start=2, size=3))),
    ]

    with pytest.raises(PlanError, match=r"'x' has .* \(4, 5\) by 'a', \(5, 5\) by 'b'"):
        translate(rules, {"a": (2, 5), "b": (3, 5)})


def test_sharing_is_no_leave_to_disagree_about_a_shape() -> None:
    rule = shared(rename("b", "a"))

    with pytest.raises(PlanError, match=r"\(2,\) by 'a', \(2, 1\) by 'b'"):
        translate([rule], {"a": (2,), "b": (2, 1)})
