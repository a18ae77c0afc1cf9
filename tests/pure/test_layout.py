"""What a trainer captures of a state dict, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from weightsync.errors import (
    DtypeError,
    PlanError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.layout import Shard, capture, register
from weightsync.spec import ITEMSIZE, Box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHORT = "int4"  # A dtype that torch has and does not declare.


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are equal."""
    return (expected.dtype, expected.shape) == (actual.dtype, actual.shape) and (
        torch.equal(raw(expected.contiguous()), raw(actual.contiguous()))
    )


def only(state_dict: Mapping[str, object]) -> torch.Tensor:
    (tensor,) = capture(state_dict).tensors
    assert tensor.is_contiguous()
    return tensor


# Sources


def test_a_contiguous_source_is_not_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    captured = capture({"w": tensor})

    assert tensor.data_ptr() == captured.tensors[0].data_ptr()
    assert Box((0, 0), (2, 3)) == captured.manifest.tensors[0].box


def test_a_transposed_source_is_captured_by_value() -> None:
    tensor = torch.arange(12).view(3, 4).t()

    expected = torch.tensor([[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]])
    assert same(expected, only({"w": tensor}))


def test_a_strided_source_is_captured_by_value() -> None:
    tensor = torch.arange(40).view(8, 5)[::2, -3:]

    expected = [[2, 3, 4], [12, 13, 14], [22, 23, 24], [32, 33, 34]]
    assert same(torch.tensor(expected), only({"w": tensor}))


def test_an_expanded_source_is_captured_by_value() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0]).expand(4, 3)

    assert same(torch.tensor([[1.0, 2.0, 3.0]] * 4), only({"w": tensor}))


def test_a_source_in_channels_last_is_captured_by_value() -> None:
    plain = torch.arange(24).view(2, 3, 2, 2)
    tensor = plain.to(memory_format=torch.channels_last)

    assert not tensor.is_contiguous()
    assert same(plain, only({"w": tensor}))


def test_lazy_conjugation_and_negation_are_resolved() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()

    assert same(torch.tensor([1 - 2j, 3 + 4j]), only({"w": conjugate}))
    assert same(torch.tensor([-2.0, 4.0]), only({"w": conjugate.imag}))
    assert conjugate.is_conj()


def test_a_source_keeps_its_bytes_and_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    tensor = only({"w": parameter})

    assert not tensor.requires_grad
    assert type(tensor) is torch.Tensor
    assert parameter.requires_grad
    assert same(torch.full((3,), 2.0), parameter.grad)


def test_a_captured_tensor_keeps_its_memory_when_the_caller_lets_go() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    tensor = only({"w": parameter})
    parameter.data = torch.zeros(5)

    assert same(torch.ones(3), tensor)


def test_a_harmless_subclass_is_captured_as_a_plain_tensor() -> None:
    class Named(torch.nn.Parameter):
        pass

    assert type(only({"w": Named(torch.ones(3))})) is torch.Tensor


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_keeps_every_bit_even_when_copied(dtype: str) -> None:
    width = ITEMSIZE[dtype]
    generator = torch.Generator().manual_seed(0)
    count = 256 if dtype != "bool" else 2
    bits = torch.randint(0, count, (64, 32, width), generator=generator)
    bits = bits.to(torch.uint8)
    tensor = bits.view(getattr(torch, dtype)).view(64, 32)

    assert torch.equal(bits.flatten(), raw(only({"w": tensor})))
    expected = bits.transpose(0, 1).contiguous().flatten()
    assert torch.equal(expected, raw(only({"w": tensor.t()})))


def test_names_are_those_without_wrappers_and_without_the_ignored() -> None:
    ones = torch.ones(1)
    captured = capture(
        {"_orig_mod.a": ones, "_orig_mod.b": None, "c.rope": b"x", "d": torch.ones(2)},
        ignore=["_orig_mod.b", "*.rope"],
    )

    assert ("a", "d") == captured.manifest.names
    assert () == capture({"_orig_mod.b": 1}, ignore=["b"]).manifest.names


def test_ignored_names_do_not_collide() -> None:
    source = {"_orig_mod.w": torch.ones(1), "w": torch.ones(1)}

    assert ("w",) == capture(source, ignore=["_orig_mod.*"]).manifest.names
    with pytest.raises(PlanError, match="both become 'w'"):
        capture(source)


# Refusals


def refusals() -> dict[str, tuple[object, type[WeightSyncError], str]]:
    tensor = torch.ones(4, 4)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    jagged = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )
    return {
        "bytes": (b"state", DtypeError, "is no tensor but of type bytes"),
        "none": (None, DtypeError, "is no tensor but of type NoneType"),
        "number": (1.0, DtypeError, "is no tensor but of type float"),
        "dict": ({"w": tensor}, DtypeError, "is no tensor but of type dict"),
        "meta": (tensor.to("meta"), UnsupportedError, "'meta'"),
        "sparse": (tensor.to_sparse(), UnsupportedError, "torch.sparse_coo"),
        "csr": (tensor.to_sparse_csr(), UnsupportedError, "torch.sparse_csr"),
        "jagged": (jagged, UnsupportedError, "NestedTensor"),
        "quantized": (
            torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
            UnsupportedError,
            "torch.quint8",
        ),
        "int4": (torch.empty(2, dtype=getattr(torch, SHORT)), DtypeError, "torch.int4"),
        "freed": (freed, UnsupportedError, "has no memory"),
        "lazy": (
            torch.nn.UninitializedParameter(),
            UnsupportedError,
            "not initialized",
        ),
        "pending": (AsyncCollectiveTensor(tensor), UnsupportedError, "AsyncColl"),
        "outside": (
            Shard(tensor, global_shape=(8, 4), offsets=(5, 0)),
            PlanError,
            r"shape \(4, 4\) at offsets \(5, 0\) is not inside global shape \(8, 4\)",
        ),
        "rank": (
            Shard(tensor, global_shape=(4,), offsets=(0, 0)),
            PlanError,
            "is not inside global shape",
        ),
        "object in shard": (
            Shard(tensor.to("meta"), global_shape=(4, 4), offsets=(0, 0)),
            UnsupportedError,
            "'meta'",
        ),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("take", [capture, register])
def test_what_cannot_be_moved_is_refused_by_name(
    take: Callable[[Mapping[str, object]], object],
) -> None:
    for name, (value, error, message) in refusals().items():
        key = f"layer.{name}"
        with pytest.raises(error, match=f"'{key}'.*{message}"):
            take({"first": torch.ones(1), key: value})


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedError, match="'w': a nested tensor"):
        capture({"w": nested})


# Ties of sources


def test_names_that_share_memory_are_tied_to_the_first() -> None:
    e = torch.arange(15.0).view(5, 3)
    captured = capture({"e": e, "h": torch.nn.Parameter(e), "g": e[:]})

    ties = [tensor.tied for tensor in captured.manifest.tensors]
    assert [None, 0, 0] == ties
    assert captured.tensors[0] is captured.tensors[1]


def test_other_views_of_the_same_memory_are_not_tied() -> None:
    w = torch.arange(16).to(torch.complex64).view(4, 4)
    real = torch.view_as_real(w)
    views = {
        "w": w,
        "t": w.t(),
        "conj": w.conj(),
        "rows": w[:2],
        "flat": w.view(16),
        "real": real,
        "dtype": real.view(torch.int32),
    }
    captured = capture(views)

    assert {None} == {tensor.tied for tensor in captured.manifest.tensors}
    for (_, view), tensor in zip(views.items(), captured.tensors, strict=True):
        assert same(view.resolve_conj(), tensor)


def test_tied_copies_are_made_once() -> None:
    w = torch.arange(6).view(2, 3).t()
    captured = capture({"a": w, "b": w})

    assert captured.tensors[0] is captured.tensors[1]


def test_one_memory_that_is_two_parts_of_tensors_is_not_tied() -> None:
    rows = torch.ones(2, 3)
    captured = capture(
        {
            "a": Shard(rows, global_shape=(4, 3), offsets=(0, 0)),
            "b": Shard(rows, global_shape=(4, 3), offsets=(2, 0)),
        }
    )

    assert [None, None] == [tensor.tied for tensor in captured.manifest.tensors]
