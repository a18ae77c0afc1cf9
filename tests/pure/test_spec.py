"""Boxes and manifests: arithmetic, encoding, what is refused from the wire."""

from __future__ import annotations

import msgspec
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.spec import ITEMSIZE, Box, Manifest, TensorSpec, validate_manifest


def spec(name: str = "w", **changes: object) -> TensorSpec:
    base = TensorSpec(name, "float32", (4, 6), Box((1, 2), (2, 4)))
    return msgspec.structs.replace(base, **changes)


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
    manifest = Manifest((spec("a"), spec("b", tied="a")))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)

    assert manifest == again
    assert manifest.digest == again.digest
    assert ("a", "b") == again.names
    assert manifest.tensors[1] == again.by_name["b"]


def test_digests_tell_manifests_apart() -> None:
    manifests = [
        Manifest(()),
        Manifest((spec("a"), spec("b"))),
        Manifest((spec("b"), spec("a"))),
        Manifest((spec("a"), spec("b", tied="a"))),
        Manifest((spec("a"), spec("b", dtype="int32"))),
    ]

    assert len(manifests) == len({manifest.digest for manifest in manifests})
    assert {16} == {len(manifest.digest) for manifest in manifests}


@pytest.mark.parametrize(
    "value",
    [
        [[["w", "float32", [4], [[0], [4]], None, "more"]]],
        [[["w", "float32", [4], [[0], [4], [1]]]]],
        [[["w", "float32", [4]]]],
        [[["w", "float32", [4.0], [[0], [4]]]]],
        [[["w", "float32", [True], [[0], [4]]]]],
        [[[b"w", "float32", [4], [[0], [4]]]]],
        [[], 1],
        {"tensors": []},
    ],
)
def test_anything_but_a_manifest_is_not_decoded(value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Manifest)


def test_a_good_manifest_passes() -> None:
    validate_manifest(
        Manifest(
            (
                spec("a"),
                spec("b", tied="a"),
                spec("c", tied="b"),
                spec("scalar", shape=(), box=Box((), ())),
                spec("none", shape=(0, 4), box=Box((0, 0), (0, 4))),
                spec("nothing of it", box=Box((4, 0), (0, 6))),
            )
        )
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((spec(), spec()), "'w': its name is given twice"),
        ((spec(dtype="quint8"),), "dtype 'quint8' is unknown"),
        ((spec(shape=(4,)),), "same number of dimensions"),
        ((spec(box=Box((0,), (4, 6))),), "same number of dimensions"),
        ((spec(shape=(1,) * 65, box=Box((0,) * 65, (1,) * 65)),), "at most 64"),
        ((spec(box=Box((-1, 0), (2, 6))),), "is not inside shape"),
        ((spec(box=Box((2, 0), (-1, 6))),), "is not inside shape"),
        ((spec(box=Box((3, 0), (2, 6))),), r"\[3:5, 0:6\] is not inside shape"),
        ((spec(shape=(-1, 0), box=Box((0, 0), (0, 0))),), "is not inside shape"),
        ((spec(shape=(2**62, 6)),), "more bytes than can be addressed"),
        ((spec(tied="w"),), "'w', which is no earlier tensor"),
        ((spec("a", tied="b"), spec("b")), "'b', which is no earlier tensor"),
        ((spec("a"), spec("b", tied="a", dtype="int32")), "another dtype, shape or"),
        ((spec("a"), spec("b", tied="a", shape=(9, 9))), "another dtype, shape or"),
        (
            (spec("a"), spec("b", tied="a", box=Box((0, 0), (2, 4)))),
            "another dtype, shape or",
        ),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    tensors: tuple[TensorSpec, ...], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        validate_manifest(Manifest(tensors))
