"""Where pieces lie in the storages of a generator, and which can be exchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engine import ShmEngine
from weightsync.epoch import Mode
from weightsync.errors import UnsupportedError
from weightsync.layout import register
from weightsync.memory import Memory
from weightsync.names import Slice, cut, fuse, rename, shared, take
from weightsync.plan import slot_layout
from weightsync.slots import Slots
from weightsync.spec import Place, validate_manifest
from weightsync.weights import Tensors, check_mode


def test_places_count_bytes_from_the_start_of_a_storage() -> None:
    fused, other = torch.zeros(4, 6), torch.zeros(3, dtype=torch.bfloat16)
    registered = register(
        {"a": fused[:, :2], "o": other, "b": fused[:, 2:], "e": other[:0]},
        mirrored=True,
    )

    expected = (
        Place(0, 0, (24, 4)),
        Place(1, 0, (2,)),
        Place(0, 8, (24, 4)),
        Place(0, 0, (0,)),
    )
    assert expected == registered.manifest.places
    assert [96, 6] == [storage.nbytes for (storage,) in registered.storages]
    assert (96, 6) == registered.manifest.storages
    validate_manifest(registered.manifest)


def test_nothing_is_said_of_places_where_pieces_are_packed() -> None:
    registered = register({"a": torch.zeros(4)})

    assert () == registered.manifest.places
    assert () == registered.manifest.storages == registered.storages


def test_tied_tensors_share_a_place() -> None:
    weight = torch.zeros(4, 2)
    registered = register({"a": weight, "b": weight.view(4, 2)}, mirrored=True)

    assert registered.manifest.places[0] == registered.manifest.places[1]
    check_mode(Mode.SWAP, registered)


def test_two_storages_of_one_memory_are_exchanged_together() -> None:
    array = np.zeros(6, dtype=np.float32)
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    registered = register({"a": first, "b": second}, mirrored=True)

    assert 1 == len(registered.storages)
    assert 2 == len(registered.storages[0])
    check_mode(Mode.SWAP, registered)


def test_storages_that_are_the_same_memory_in_part_are_refused() -> None:
    array = np.zeros(6, dtype=np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[4:])
    tied = {"a": whole[:4], "b": whole[4:], "c": part}
    beside = {"c": part, "a": whole[:4]}
    for tensors, names in ((tied, "'a' and 'c'"), (beside, "'c' and 'a'")):
        with pytest.raises(UnsupportedError, match=rf"{names}.*'staged'"):
            register(tensors, mirrored=True)

    assert [None, None, 1] == [s.tied for s in register(tied).manifest.tensors]


def test_storages_may_follow_each_other_in_one_memory() -> None:
    array = np.zeros(6, dtype=np.float32)
    tensors = {"b": torch.from_numpy(array[4:]), "a": torch.from_numpy(array[:4])}

    assert (8, 16) == register(tensors, mirrored=True).manifest.storages


def test_an_empty_tensor_may_be_all_there_is() -> None:
    registered = register({"a": torch.zeros(0, 4)}, mirrored=True)
    check_mode(Mode.SWAP, registered)

    assert 0 == slot_layout(registered.manifest).nbytes


def test_half_a_storage_is_enough() -> None:
    fused = torch.zeros(10, 2)
    registered = register({"q": fused[:3], "k": fused[6:8]}, mirrored=True)
    check_mode(Mode.SWAP, registered)

    assert (80,) == registered.manifest.storages
    assert (0, 48) == slot_layout(registered.manifest).offsets
    assert 128 == slot_layout(registered.manifest).nbytes


@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.INPLACE])
def test_less_than_half_a_storage_is_refused(mode: Mode) -> None:
    fused = torch.zeros(10, 2)
    views = {"q": fused[:3], "same": fused[:3], "k": fused[6:7], "none": fused[:0]}
    other = torch.zeros(4)
    with pytest.raises(
        UnsupportedError,
        match=rf"^'q', 'same', 'k': mode '{mode.value}'.*32 of the 80 bytes.*'staged'",
    ):
        check_mode(mode, register({"other": other, **views}, mirrored=True))
    check_mode(Mode.STAGED, register(views))


def test_a_refusal_lists_a_few_of_many_tensors() -> None:
    many = torch.zeros(1 << 20)
    views = {f"w{i}": many[i] for i in range(1000)}
    with pytest.raises(UnsupportedError, match=r"^'w0', 'w1'.*and 980 more: mode"):
        check_mode(Mode.SWAP, register(views, mirrored=True))


def test_padding_of_an_entry_is_part_of_its_storage() -> None:
    rules = [cut("w", dim=0, index=1, count=2, size=7)]
    registered = register({"w": torch.zeros(4, 2)}, names=rules, mirrored=True)
    check_mode(Mode.SWAP, registered)

    assert "[4:7, 0:2]" == str(registered.manifest.tensors[0].box)
    assert (32,) == registered.manifest.storages


def test_a_push_fills_memories_and_not_names() -> None:
    memory = torch.zeros(4, 2)
    parts = [take("first", Slice(0, size=2)), take("second", Slice(0, size=2))]
    rules = [fuse("w", parts), shared(rename("half", "first"))]
    state = {"w": memory, "half": memory[:2], "empty": memory[:0]}
    registered = register(state, names=rules, mirrored=True)
    slots = Slots.of(Mode.INPLACE, registered.manifest)
    window = Memory([torch.zeros(slots.nbytes, dtype=torch.uint8)], slots.segments)
    tensors = Tensors(Mode.INPLACE, registered, window, slots, ShmEngine())
    pushes = [{"first"}, {"second"}, {"first", "second", "empty"}, {"empty"}]

    expected = [{0}, {1}, {0, 1}, set[int]()]
    assert expected == [set(tensors.covered_by(frozenset(names))) for names in pushes]


def test_the_default_device_of_the_caller_does_not_matter() -> None:
    fused = torch.zeros(4, 6)
    with torch.device("meta"):
        registered = register({"a": fused[:, :2], "b": fused[:, 2:]}, mirrored=True)

    assert [96] == [storage.nbytes for (storage,) in registered.storages]
    assert not registered.storages[0][0].is_meta


@st.composite
def partitions(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views that together are one or two buffers, each byte once."""
    views = [torch.zeros(draw(st.integers(1, 6)), draw(st.integers(1, 6)))]
    views += draw(st.sampled_from([[], [torch.zeros(3, dtype=torch.int16)]]))
    for _ in range(draw(st.integers(0, 4))):
        view = views.pop(draw(st.integers(0, len(views) - 1)))
        dim = draw(st.integers(0, view.dim() - 1))
        at = draw(st.integers(0, view.shape[dim]))
        step = draw(st.booleans())
        if step and view.shape[dim] > 1:
            parts = [view.unfold(dim, 1, 2).squeeze(-1)]
            rest = view.narrow(dim, 1, view.shape[dim] - 1)
            parts.append(rest.unfold(dim, 1, 2).squeeze(-1))
        else:
            parts = list(view.split([at, view.shape[dim] - at], dim))
        views += [part.t() if draw(st.booleans()) else part for part in parts]
    return views


@given(partitions(), st.data())
def test_storages_are_exchanged_if_half_of_their_bytes_have_an_owner(
    views: list[torch.Tensor], data: st.DataObject
) -> None:
    tensors = {f"w{i}": view for i, view in enumerate(views)}
    kept = data.draw(st.lists(st.sampled_from(sorted(tensors)), unique=True))
    registered = register(
        {"x": torch.zeros(1), **{name: tensors[name] for name in kept}}, mirrored=True
    )
    validate_manifest(registered.manifest)
    filled: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for name in kept:
        storage = tensors[name].untyped_storage()
        if tensors[name].numel():
            sizes[storage.data_ptr()] = storage.nbytes()
            filled.setdefault(storage.data_ptr(), 0)
            filled[storage.data_ptr()] += tensors[name].nbytes
    refused = False
    try:
        check_mode(Mode.SWAP, registered)
    except UnsupportedError:
        refused = True

    assert any(2 * filled[at] < sizes[at] for at in sizes) == refused
    slots = [64, *(size + -size % 64 for size in sizes.values())]
    assert sum(slots) == slot_layout(registered.manifest).nbytes
