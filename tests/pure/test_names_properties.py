"""Rules of names made up at random, compared with plain indexing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.applying import SENTINEL, counted, fill, raw, same_bytes
from weightsync.errors import PlanError
from weightsync.names import (
    Entry,
    Fused,
    Rule,
    Slice,
    Source,
    cut,
    fuse,
    stack,
    take,
    translate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Draw = st.DrawFn
Pushed = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Span:
    """The elements of one dim of a pushed tensor that lie here."""

    start: int
    size: int
    index: int
    count: int
    whole: int

    def slice(self, dim: int) -> Slice:
        return Slice(
            dim,
            self.index,
            self.count,
            start=self.start,
            size=self.size,
            whole=self.whole,
        )

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        used = tensor.narrow(dim, self.start, self.size)
        return used.chunk(self.count, dim)[self.index] if self.size else used

    @property
    def length(self) -> int:
        return self.size // self.count


@st.composite
def spans(draw: Draw, length: int | None = None) -> Span:
    length = draw(st.integers(0, 3)) if length is None else length
    count = draw(st.integers(1, 3))
    start, rest = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    index = draw(st.integers(0, count - 1))
    size = length * count
    return Span(start, size, index, count, start + size + rest)


@dataclass(frozen=True)
class Case:
    """A value, the shapes of what it takes, and how to make the same by hand."""

    value: Source | Fused
    shapes: dict[str, tuple[int, ...]]
    by_hand: Callable[[Pushed], torch.Tensor]


@st.composite
def sources(draw: Draw, name: str, shape: tuple[int, ...], fused: int | None) -> Case:
    """Cut the dims at random; the fused one is as long as it likes."""
    cuts = {
        dim: draw(spans(None if dim == fused else size))
        for dim, size in enumerate(shape)
        if dim == fused or draw(st.booleans())
    }
    whole = tuple([cuts[d].whole if d in cuts else n for d, n in enumerate(shape)])
    slices = draw(st.permutations([span.slice(dim) for dim, span in cuts.items()]))

    def by_hand(pushed: Pushed) -> torch.Tensor:
        tensor = pushed[name]
        for dim, span in cuts.items():
            tensor = span.of(tensor, dim)
        return tensor

    return Case(take(name, *slices), {name: whole}, by_hand)


@st.composite
def fusions(draw: Draw, prefix: str, shape: tuple[int, ...]) -> Case:
    dim = draw(st.integers(0, len(shape) - 1))
    cases = [
        draw(sources(f"{prefix}{index}", shape, dim))
        for index in range(draw(st.integers(1, 4)))
    ]
    value = Fused(
        tuple([case.value for case in cases if isinstance(case.value, Source)]), dim
    )
    return Case(
        value,
        {name: whole for case in cases for name, whole in case.shapes.items()},
        lambda pushed: torch.cat([case.by_hand(pushed) for case in cases], dim),
    )


shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
"""Of tensors here; hypothesis makes them small."""


def pushed_tensors(wholes: dict[str, tuple[int, ...]]) -> Pushed:
    return {
        name: counted(*whole, start=10_000 * index)
        for index, (name, whole) in enumerate(wholes.items())
    }


def checked(rule: Rule, name: str, expected: torch.Tensor, pushed: Pushed) -> None:
    filled = fill([rule], {name: tuple(expected.shape)}, pushed)

    assert same_bytes({name: expected}, filled)


@given(data=st.data(), shape=shapes)
def test_any_part_of_a_pushed_tensor_is_taken_as_narrow_takes_it(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    case = data.draw(sources("x", shape, None))
    pushed = pushed_tensors(case.shapes)

    checked(Rule("w", case.value), "w", case.by_hand(pushed), pushed)


@given(data=st.data(), shape=shapes)
def test_any_parts_are_fused_as_cat_fuses_them(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    case = data.draw(fusions("x", shape))
    pushed = pushed_tensors(case.shapes)

    assert isinstance(case.value, Fused)
    rule = fuse("w", case.value.sources, dim=case.value.dim)
    checked(rule, "w", case.by_hand(pushed), pushed)


@given(
    data=st.data(),
    shape=shapes,
    first=st.integers(0, 12),
    count=st.integers(1, 4),
    fused=st.booleans(),
)
def test_any_values_are_stacked_as_stack_stacks_them(
    data: st.DataObject, shape: tuple[int, ...], first: int, count: int, *, fused: bool
) -> None:
    kind = fusions("{n}.", shape) if fused else sources("{n}.x", shape, None)
    case = data.draw(kind)
    pushed = pushed_tensors(
        {
            name.replace("{n}", str(n)): whole
            for n in range(first + count)
            for name, whole in case.shapes.items()
        }
    )
    expected = torch.stack(
        [
            case.by_hand(
                {name: pushed[name.replace("{n}", str(n))] for name in case.shapes}
            )
            for n in range(first, first + count)
        ]
    )

    checked(stack("w", case.value, over="n", first=first), "w", expected, pushed)


@given(data=st.data(), shape=shapes, entries=st.integers(1, 12))
def test_any_stack_comes_apart_into_what_it_was_made_of(
    data: st.DataObject, shape: tuple[int, ...], entries: int
) -> None:
    case = data.draw(sources("x", shape, None))
    assert isinstance(case.value, Source)
    pushed = {"x": counted(entries, *case.shapes["x"])}
    here = data.draw(st.permutations(range(entries)))
    rule = Rule("w.{n}", take("x", *case.value.slices, entry=Entry("n", entries)))
    expected = {f"w.{n}": case.by_hand({"x": pushed["x"][n]}) for n in here}
    filled = fill(
        [rule], {name: tuple(w.shape) for name, w in expected.items()}, pushed
    )

    assert same_bytes(expected, filled)


@given(
    size=st.integers(0, 20),
    ranks=st.integers(1, 6),
    multiple=st.integers(1, 8),
    dim=st.integers(0, 1),
)
def test_padded_slices_of_all_ranks_are_the_whole_and_then_padding(
    size: int, ranks: int, multiple: int, dim: int
) -> None:
    whole = counted(*((size, 3) if dim == 0 else (3, size)))
    step = ranks * multiple
    each = -(-size // step) * multiple
    shape = (each, 3) if dim == 0 else (3, each)
    filled = torch.cat(
        [
            fill(
                [cut("w", dim=dim, index=rank, count=ranks, size=size)],
                {"w": shape},
                {"w": whole},
            )["w"]
            for rank in range(ranks)
        ],
        dim,
    )

    assert torch.equal(raw(whole), raw(filled.narrow(dim, 0, size)))
    assert bool((filled.narrow(dim, size, filled.shape[dim] - size) == SENTINEL).all())


@given(
    boxes=st.lists(
        st.tuples(*[st.integers(0, 5), st.integers(0, 3)] * 2), min_size=1, max_size=6
    )
)
def test_the_same_elements_are_found_wherever_two_tensors_take_them(
    boxes: list[tuple[int, int, int, int]],
) -> None:
    rules = [
        Rule(
            f"w{index}",
            take(
                "x",
                Slice(0, start=top, size=height, whole=8),
                Slice(1, start=left, size=width, whole=8),
            ),
        )
        for index, (top, height, left, width) in enumerate(boxes)
    ]
    here = {f"w{index}": (box[1], box[3]) for index, box in enumerate(boxes)}
    taken = torch.zeros(8, 8)
    for top, height, left, width in boxes:
        taken[top : top + height, left : left + width] += 1

    with (
        nullcontext() if taken.max() <= 1 else pytest.raises(PlanError, match="shared")
    ):
        translate(rules, here)


names = st.lists(
    st.text("ab.{}*\n", min_size=1, max_size=6).filter(lambda text: "{" not in text),
    unique=True,
    max_size=5,
)


@given(names=names)
def test_any_name_is_found_whole_by_a_path_and_put_back(names: list[str]) -> None:
    rule = Rule("x{*path}y", take("{*path}"))
    here = {f"x{name}y": (2,) for name in names}
    translated = translate([rule], here) if here else {}

    assert names == [part.name for (part,) in translated.values()]
