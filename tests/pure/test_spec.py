"""Boxes and manifests: arithmetic, encoding, what is refused from the wire."""

from __future__ import annotations

import msgspec
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.spec import (
    ITEMSIZE,
    Box,
    Manifest,
    Place,
    TensorSpec,
    validate_manifest,
)


def spec(name: str = "w", **changes: object) -> TensorSpec:
    base = TensorSpec(name, "float32", (4, 6), Box((1, 2), (2, 4)))
    return base._replace(**changes)  # type: ignore[arg-type] # fields by name


def test_boxes_intersect_in_what_both_hold() -> None:
    both = Box((0, 2), (3, 4)).intersect(Box((1, 0), (5, 4)))

    assert Box((1, 2), (2, 2)) == both
    assert 4 == both.numel


@pytest.mark.parametrize(
    "other", [Box((3, 0), (1, 6)), Box((0, 4), (3, 0)), Box((7, 7), (1, 1))]
)
def test_boxes_that_do_not_meet_have_an_empty_intersection(other: Box) -> None:
    assert Box((0, 2), (3, 4)).intersect(other).empty


def test_a_box_without_dimensions_holds_one_element() -> None:
    scalar = Box((), ())

    assert 1 == scalar.numel
    assert not scalar.empty
    assert scalar == scalar.intersect(scalar)


def test_boxes_of_different_rank_do_not_intersect() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersect(Box((), ()))


def test_a_box_is_shown_as_slices() -> None:
    assert "[1:3, 2:6]" == str(spec().box)


def test_bytes_of_a_tensor_are_those_of_its_box() -> None:
    assert 32 == spec().nbytes
    assert 16 == spec(dtype="bfloat16").nbytes


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_has_the_size_that_torch_gives_it(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == ITEMSIZE[dtype]


def test_a_manifest_survives_the_wire() -> None:
    manifest = Manifest.of((spec("a"), spec("b", tied=0)))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)

    assert manifest == again
    assert manifest.digest == again.digest
    assert ("a", "b") == again.names
    assert (spec("a"), spec("b", tied=0)) == again.tensors


def test_digests_tell_manifests_apart() -> None:
    manifests = [
        Manifest.of(()),
        Manifest.of((spec("a"), spec("b"))),
        Manifest.of((spec("b"), spec("a"))),
        Manifest.of((spec("a"), spec("b", tied=0))),
        Manifest.of((spec("a"), spec("b", dtype="int32"))),
    ]

    assert len(manifests) == len({manifest.digest for manifest in manifests})
    assert {16} == {len(manifest.digest) for manifest in manifests}


@pytest.mark.parametrize(
    "value",
    [
        [[["float32", [4], [[0], [4]], 0, "more"]], ["w"], [0]],
        [[["float32", [4], [[0], [4], [1]]]], ["w"], [0]],
        [[["float32", [4]]], ["w"], [0]],
        [[["float32", [4.0], [[0], [4]]]], ["w"], [0]],
        [[["float32", [True], [[0], [4]]]], ["w"], [0]],
        [[["float32", [4], [[0], [4]]]], [b"w"], [0]],
        [[["float32", [4], [[0], [4]]]], ["w"]],
        [[], [], [], [], [], 1],
        [[], [], [], [], [], [], 1],
        [[], [], [], [[1]]],
        {"kinds": []},
    ],
)
def test_anything_but_a_manifest_is_not_decoded(value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Manifest)


def test_a_good_manifest_passes() -> None:
    validate_manifest(
        Manifest.of(
            (
                spec("a"),
                spec("b", tied=0),
                spec("c", tied=1),
                spec("scalar", shape=(), box=Box((), ())),
                spec("none", shape=(0, 4), box=Box((0, 0), (0, 4))),
                spec("nothing of it", box=Box((4, 0), (0, 6))),
            )
        )
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((spec(dtype="quint8"),), "dtype 'quint8' is unknown"),
        ((spec(shape=(4,)),), "same number of dimensions"),
        ((spec(box=Box((0,), (4, 6))),), "same number of dimensions"),
        ((spec(shape=(1,) * 65, box=Box((0,) * 65, (1,) * 65)),), "at most 64"),
        ((spec(box=Box((-1, 0), (2, 6))),), "is not inside shape"),
        ((spec(box=Box((2, 0), (-1, 6))),), "is not inside shape"),
        ((spec(box=Box((3, 0), (2, 6))),), r"\[3:5, 0:6\] is not inside shape"),
        ((spec(shape=(-1, 0), box=Box((0, 0), (0, 0))),), "is not inside shape"),
        ((spec(shape=(2**62, 6)),), "more bytes than can be addressed"),
        ((spec(tied=0),), "piece 0 is tied to 0, which is no earlier one"),
        ((spec("a", tied=1), spec("b")), "piece 0 is tied to 1, which is no earlier"),
        ((spec("a"), spec("b", tied=-1)), "piece 1 is tied to -1, which is no earlier"),
        ((spec("a"), spec("b", tied=0, dtype="int32")), "another dtype, shape or"),
        ((spec("a"), spec("b", tied=0, shape=(9, 9))), "another dtype, shape or"),
        (
            (spec("a"), spec("b", tied=0, box=Box((0, 0), (2, 4)))),
            "another dtype, shape or",
        ),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    tensors: tuple[TensorSpec, ...], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        validate_manifest(Manifest.of(tensors))


def test_places_travel_and_tell_manifests_apart() -> None:
    placed = [
        spec("a", place=Place(0, 8, (24, 4))),
        spec("b", place=Place(1, 0, (16, 4))),
    ]
    manifest = Manifest.of(placed, storages=(100, 32))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    validate_manifest(again)

    assert tuple(placed) == again.tensors
    assert (100, 32) == again.storages
    digests = [
        manifest.digest,
        Manifest.of(placed, storages=(101, 32)).digest,
        Manifest.of([spec("a"), spec("b")]).digest,
    ]
    assert 3 == len(set(digests))


def test_a_piece_may_end_with_its_storage() -> None:
    """It is 2 by 4 float32, so it ends 40 bytes behind its start."""
    placed = spec(place=Place(0, 8, (24, 4)))
    validate_manifest(Manifest.of([placed], storages=(48,)))
    with pytest.raises(ProtocolError, match=r"ends at byte 48 of a storage of 47"):
        validate_manifest(Manifest.of([placed], storages=(47,)))


def test_an_empty_piece_needs_no_storage() -> None:
    nothing = spec(box=Box((4, 0), (0, 6)), place=Place(0, 0, (0, 0)))

    validate_manifest(Manifest.of([nothing]))
    validate_manifest(
        Manifest.of([nothing, spec("b", place=Place(0, 0, (16, 4)))], [32])
    )


GOOD = Place(0, 0, (24, 4))


@pytest.mark.parametrize(
    ("places", "storages", "message"),
    [
        ([GOOD], (64,), "2 names, but places for 1"),
        ([Place(0, 0, (24,)), GOOD], (64,), "is no place of a box"),
        ([Place(0, -4, (24, 4)), GOOD], (64,), "is no place of a box"),
        ([Place(0, 0, (24, -4)), GOOD], (64,), "is no place of a box"),
        ([Place(1, 0, (24, 4)), GOOD], (64,), "is in no storage of 1"),
        ([Place(-1, 0, (24, 4)), GOOD], (64,), "is in no storage of 1"),
        ([Place(0, 2**63, (1, 1)), GOOD], (64,), "ends at byte 9223372036854775816"),
        ([Place(0, 0, (2**62, 1)), GOOD], (64,), "ends at byte"),
        ([GOOD, GOOD], (), "ends at byte 40 of a storage of 0"),
        ([GOOD, GOOD], (64, -1), "fewer than none"),
        ([GOOD, GOOD], (64, 2**63 - 64), "more bytes than can be"),
        ([], (64,), "storages, but no places"),
    ],
)
def test_places_that_no_memory_has_are_refused(
    places: list[Place], storages: tuple[int, ...], message: str
) -> None:
    good = Manifest.of([spec("a"), spec("b")])
    columns = good.kinds, good.names, good.kind_of

    with pytest.raises(ProtocolError, match=message):
        validate_manifest(Manifest(*columns, (), tuple(places), storages))


@pytest.mark.parametrize(
    ("kind_of", "ties", "message"),
    [
        ((0,), (), "2 names, but kinds for 1"),
        ((0, 2), (), "no kind 2"),
        ((0, -1), (), "no kind -1"),
        ((0, 0), ((1, 0), (1, 0)), "a tie of piece 1 after one of piece 1"),
        ((0, 0), ((2, 0),), "a tie of piece 2"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    kind_of: tuple[int, ...], ties: tuple[tuple[int, int], ...], message: str
) -> None:
    kinds = Manifest.of([spec("a")]).kinds

    with pytest.raises(ProtocolError, match=message):
        validate_manifest(Manifest(kinds, ("a", "b"), kind_of, ties))


def test_pieces_know_the_first_that_views_their_memory() -> None:
    tied = Manifest.of([spec("a"), spec("b"), spec("c", tied=1), spec("d", tied=2)])

    assert [0, 1, 1, 1] == list(tied.roots)
    assert [0, 1] == list(Manifest.of([spec("a"), spec("b")]).roots)
