"""What an entry of a state dict is: local memory, and its place in a global tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from weightsync.errors import DtypeError, PlanError, UnsupportedError
from weightsync.fsdp import Copies
from weightsync.names import canonical_names
from weightsync.spec import ITEMSIZE, Box
from weightsync.stretches import LocalBox, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor import DTensor

DTYPES: Final[dict[torch.dtype, str]] = {
    getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)
}

_DISPATCH: Final = "__torch_dispatch__"
"""Where a class has its own, what it shows of memory need not be true."""


StateDict = Mapping[str, object] | Iterable[tuple[str, object]]
"""Names and tensors: a mapping, or pairs as ``named_parameters()`` gives them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor that its owner cut himself: where it lies in the global tensor.

    ``global_shape`` and ``offsets`` are in elements, one number per dimension.
    """

    tensor: torch.Tensor
    _: KW_ONLY
    global_shape: Sequence[int]
    offsets: Sequence[int]


class Entry(NamedTuple):
    """One entry of a state dict.

    ``name`` is canonical, ``shape`` the global one. ``held`` says which boxes the local
    tensor has: none where this rank is not part of the mesh. ``replica`` tells which
    copy of the tensor they are part of.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    held: tuple[LocalBox, ...]
    replica: int = 0


def named(state_dict: object) -> Mapping[str, object]:
    """Return a mapping as it is, and pairs of name and value as one.

    Raises PlanError for what is neither, and for a name that comes twice.
    """
    found: Mapping[Any, object] = (
        state_dict if isinstance(state_dict, Mapping) else _collected(state_dict)
    )
    for name in found:
        if not isinstance(name, str):
            raise PlanError(
                f"a name is a str, not the {type(name).__qualname__} {name!r}"
            )
    return found


def located(state_dict: Mapping[str, object]) -> list[Entry]:
    """Locate every entry, in order; no tensor is changed or copied.

    Raises what ``layout.capture`` does for entries; each error names one.
    """
    names = canonical_names(state_dict)
    copies = Copies()
    entries: list[Entry] = []
    with torch.no_grad():
        for name, value in state_dict.items():
            entry = _locate(names[name], value)
            if copies and copies.have(
                entry.tensor, getattr(value, "device_mesh", None)
            ):
                raise UnsupportedError(
                    f"{entry.name!r}: is a copy that FSDP gathered, which may be older "
                    f"than the sharded parameter; call reshard() on the module first, "
                    f"or take its state_dict()"
                )
            entries.append(entry)
    return entries


def dtensor_type() -> type[DTensor] | None:
    """DTensor's class; None where nobody has imported it, so that there is none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def spec_of(value: Any) -> Any:
    """Return all that torch knows of where a DTensor lies; the same object if equal."""
    return value._spec


def _collected(pairs: object) -> dict[str, object]:
    if isinstance(pairs, (str, bytes, torch.Tensor)) or not isinstance(pairs, Iterable):
        raise PlanError(
            f"a state dict is a mapping or pairs of name and tensor, not a "
            f"{type(pairs).__qualname__}"
        )
    found: dict[Any, object] = {}
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise PlanError(
                f"a state dict is a mapping or pairs of name and tensor, but among "
                f"the pairs is a {type(pair).__qualname__}"
            )
        name, value = pair
        if name in found:
            raise PlanError(f"{name!r}: comes twice among the pairs of name and tensor")
        found[name] = value
    return found


def _locate(name: str, value: object) -> Entry:
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        _check_kind(name, value)
        shape = tuple(value.shape)
        return Entry(name, value, shape, _all_of(shape))
    if isinstance(value, Shard):
        return _shard(name, value)
    if not isinstance(value, torch.Tensor):
        raise DtypeError(
            f"{name!r}: is no tensor but of type {type(value).__qualname__}; "
            f"only tensors are moved"
        )
    distributed = dtensor_type()
    if distributed is not None and isinstance(value, distributed):
        return _dtensor(name, value)
    shape = tuple(_plain(name, value).shape)
    return Entry(name, value, shape, _all_of(shape))


_all_of: Final = lru_cache(maxsize=4096)(whole)
"""Most shapes of a model occur again and again."""


def _shard(name: str, shard: Shard) -> Entry:
    tensor = _plain(name, shard.tensor)
    shape = tuple(shard.global_shape)
    box = Box(tuple(shard.offsets), tuple(tensor.shape))
    _check_inside(name, box, shape)
    return Entry(name, tensor, shape, (LocalBox(box, (0,) * len(shape)),))


def _dtensor(name: str, value: DTensor) -> Entry:
    from weightsync.placements import arrangements, copy_number

    mesh, placements, shape = value.device_mesh, value.placements, tuple(value.shape)
    local = _plain(name, value.to_local())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Entry(name, local, shape, ())
    mesh_place = tuple(mesh.shape), tuple(coordinate), placements
    try:
        possible = arrangements(shape, *mesh_place)
    except (PlanError, UnsupportedError) as error:
        raise type(error)(f"{name!r}: a DTensor's {error}") from None
    _check_order(name, value)
    for held in possible:
        if _extent(held) == tuple(local.shape):
            return Entry(name, local, shape, held, copy_number(*mesh_place))
    raise PlanError(
        f"{name!r}: the local tensor has shape {tuple(local.shape)}, but global shape "
        f"{shape} and placements {placements} give this rank {_extent(possible[0])}"
    )


def _check_order(name: str, value: DTensor) -> None:
    """Placements cut from left to right, unless an order that torch keeps apart."""
    spec = spec_of(value)
    order = getattr(spec, "shard_order", None)
    if order is not None and not spec.is_default_device_order(order):
        raise UnsupportedError(
            f"{name!r}: a DTensor's placements {value.placements} with the order "
            f"{order} are not supported"
        )


def _extent(held: Sequence[LocalBox]) -> tuple[int, ...]:
    """The shape of the local tensor that has these boxes."""
    box, start = held[-1]
    return tuple([a + b for a, b in zip(start, box.sizes, strict=True)])


# What may be moved


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unless it is a face of something else or cannot be moved."""
    if is_lazy(tensor):
        raise UnsupportedError(f"{name!r}: is not initialized yet")
    kind = type(tensor)
    if getattr(kind, _DISPATCH) is not getattr(torch.Tensor, _DISPATCH):
        raise UnsupportedError(f"{name!r}: a {kind.__qualname__} cannot be moved")
    _check_kind(name, tensor)
    return tensor


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedError(
            f"{name!r}: is on device {str(tensor.device)!r}; only the CPU and CUDA are "
            f"supported"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedError(f"{name!r}: a {kind} tensor cannot be moved")
    if tensor.dtype not in DTYPES:
        error = UnsupportedError if tensor.is_quantized else DtypeError
        raise error(f"{name!r}: {tensor.dtype} cannot be moved as bytes")
    if tensor.untyped_storage().nbytes() < memory_end(tensor):
        raise UnsupportedError(f"{name!r}: has no memory; its storage was freed")


def memory_end(tensor: torch.Tensor) -> int:
    """Bytes from the start of its storage to the end of a tensor's last element."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum([(size - 1) * step for size, step in steps])
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def _check_inside(name: str, box: Box, shape: tuple[int, ...]) -> None:
    fits = len(box.sizes) == len(shape) == len(box.offsets) and all(
        0 <= offset <= offset + size <= all_of_it
        for size, all_of_it, offset in zip(box.sizes, shape, box.offsets, strict=True)
    )
    if not fits:
        raise PlanError(
            f"{name!r}: a shard of shape {box.sizes} at offsets {box.offsets} is not "
            f"inside global shape {shape}"
        )
