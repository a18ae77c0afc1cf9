"""Manifests of several ranks on the wire: what they share stands once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.channel import MAX_FRAME
from weightsync.errors import ProtocolError
from weightsync.framing import frame
from weightsync.messages import MAX_RANKS, FormLink, Layout, Manifests, ToTrainer
from weightsync.spec import Box, Manifest, Place, TensorSpec
from weightsync.together import Together, validate_together


def piece(name: str, start: int = 0, **changes: Any) -> TensorSpec:
    box = Box((start, 0), (2, 6))
    return TensorSpec(name, "float32", (2 * MAX_RANKS, 6), box)._replace(**changes)


def over_the_wire(together: Together) -> Together:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(together), type=Together)


@st.composite
def ranks(draw: st.DrawFn) -> Manifest:
    """A rank of a small family: many of them have something in common."""
    names = draw(st.sampled_from([(), ("a", "b"), ("a", "b", "a"), ("c",)]))
    placed, tie, start = (
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 4)),
    )
    pieces = [
        piece(name, start, place=Place(0, 48 * index, (24, 4)) if placed else None)
        for index, name in enumerate(names)
    ]
    if tie and len(pieces) > 1:
        pieces[1] = pieces[1]._replace(tied=0)
    return Manifest.of(pieces)


@given(st.lists(ranks(), max_size=8))
def test_manifests_survive_the_wire_together(manifests: list[Manifest]) -> None:
    again = over_the_wire(Together.of(manifests)).manifests

    assert tuple(manifests) == again
    assert [m.digest for m in manifests] == [m.digest for m in again]


def test_every_column_survives_the_wire() -> None:
    place = Place(0, 0, (24, 4))
    pieces = [piece("a", replica=3, place=place), piece("b", tied=0, place=place)]
    manifest = Manifest.of(pieces, (64,))
    (again,) = over_the_wire(Together.of([manifest])).manifests

    assert manifest == again
    assert all(getattr(again, field) for field in Manifest.__struct_fields__)


def test_ranks_that_list_the_same_share_it_on_the_wire_and_in_memory() -> None:
    manifests = [
        Manifest.of([piece("a", rank), piece("b", rank)]) for rank in (0, 2, 4)
    ]
    together = over_the_wire(Together.of([*manifests, Manifest.of([piece("b")])]))
    first, second, third, other = together.manifests

    assert 2 == len(together.tables)
    assert first.names is second.names is third.names
    assert first.kind_of is second.kind_of is third.kind_of
    assert ("b",) == other.names


def test_the_largest_job_fits_into_a_frame() -> None:
    names = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2000)]
    whole = Manifest.of([piece(name) for name in names])
    kinds = [Manifest.of([piece("", 2 * rank)]).kinds for rank in range(MAX_RANKS)]
    together = Together.of(msgspec.structs.replace(whole, kinds=k) for k in kinds)
    size = len(frame(Layout(bytes(16), together), MAX_FRAME))

    assert size < 1 << 20
    assert MAX_RANKS * len("".join(names)) > MAX_FRAME


def test_messages_carry_manifests_of_several_ranks() -> None:
    manifests = (Manifest.of([piece("a")]), Manifest.of([piece("a", 2)]))
    together = Together.of(manifests)
    form = FormLink(0, 1, ("handle",), 1, 5.0, together)
    layout = Layout(bytes(16), together)
    found: list[Any] = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToTrainer)
        for message in (form, layout)
    ]
    encoded = msgspec.msgpack.encode(Manifests(together))

    assert [form, layout] == found
    assert [manifests, manifests] == [message.manifests for message in found]
    assert Manifests(together) == msgspec.msgpack.decode(encoded, type=Manifests)


def placed(rows: int = 2, start: int = 0) -> Manifest:
    """A rank whose one storage has room for two rows."""
    box = Box((start, 0), (rows, 6))
    return Manifest.of([piece("w", box=box, place=Place(0, 0, (24, 4)))], [48])


TIED = Manifest(
    (*placed().kinds, *placed(start=2).kinds), ("a", "b"), (0, 1), ((1, 0),)
)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (placed(3), "rank 2: manifest: .* of a storage of 48"),
        (placed(start=2 * MAX_RANKS), "rank 2: manifest: .* is not inside"),
        (TIED, "rank 2: manifest: tensor 'b' is tied to 'a'"),
        (Manifest((), ("w",), (0,)), "rank 2: manifest: no kind 0"),
    ],
)
def test_every_rank_is_checked(bad: Manifest, message: str) -> None:
    good = [placed(), placed(start=4)]
    validate_together(Together.of(good))

    with pytest.raises(ProtocolError, match=message):
        validate_together(Together.of([*good, bad]))


def test_ties_are_checked_on_each_rank_of_a_table() -> None:
    kinds = (*placed().kinds, *placed().kinds)
    together = Together.of([msgspec.structs.replace(TIED, kinds=kinds), TIED])

    assert 1 == len(together.tables)
    with pytest.raises(ProtocolError, match="rank 1: manifest: tensor 'b' is tied"):
        validate_together(together)


TABLE = [[], ["w"], [0]]
KINDS = [["float32", [4], [[0], [4]]]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[TABLE], [[1, KINDS]]], "rank 0 has table 1 of 1"),
        ([[TABLE], [[0, KINDS], [-1, KINDS]]], "rank 1 has table -1 of 1"),
        ([[], [[0, KINDS]]], "rank 0 has table 0 of 0"),
        ([[TABLE, [KINDS, ["w"], [0]]], [[0, KINDS]]], "table 1 has kinds"),
        ([[TABLE], [[0.0, KINDS]]], "Expected `int`"),
        ([[TABLE], [[0]]], "at least length 2"),
        ([[TABLE], [[0, KINDS, []]]], "got 3"),
        ([[TABLE], [], []], "got 3"),
        ([[[[], ["w"]]], []], "at least length 3"),
        ([TABLE], "Expected `array`"),
    ],
)
def test_anything_else_is_not_decoded(value: object, message: str) -> None:
    encoded = msgspec.msgpack.encode(value)

    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.msgpack.decode(encoded, type=Together)
