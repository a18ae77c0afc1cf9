"""What ranks exchange, and what reductions make of it: computed on the host."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOVED: Final = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.complex128,
)
"""The dtypes that c10d maps to those of NCCL, or to bytes."""

UNMAPPED: Final = (torch.int16, torch.uint16, torch.uint32, torch.uint64)

REDUCED: Final = tuple(dtype for dtype in MOVED if "fnuz" not in str(dtype))

FACTOR: Final = 0.3
"""Of PREMUL_SUM. No dtype holds it exactly, so that its rounding shows."""


def name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without that of its module."""
    return str(dtype).removeprefix("torch.")


def octets(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, wherever it is."""
    here = tensor.detach().cpu().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy().tobytes()


def payload(dtype: torch.dtype, count: int, *seed: int) -> torch.Tensor:
    """Return values with any bit patterns that the dtype has, NaNs among them."""
    data = random.Random(repr(seed)).randbytes(count * dtype.itemsize)
    return _tensor(
        bytes(one & 1 for one in data) if dtype == torch.bool else data, dtype
    )


def blank(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return what stands in an output before anything is written to it."""
    return _tensor(b"\x01" * (count * dtype.itemsize), dtype)


def addends(
    reduction: str, dtype: torch.dtype, count: int, rank: int, world: int
) -> torch.Tensor:
    """Return the input of a rank whose result is the same in every order.

    Integers may wrap around. Sums and products of floats are exact at every step.
    """
    if dtype.is_complex:
        parts = addends(reduction, dtype.to_real(), 2 * count, rank, world)
        return torch.view_as_complex(parts.reshape(count, 2))
    if dtype == torch.bool or (not dtype.is_floating_point and reduction != "avg"):
        return payload(dtype, count, rank)
    if reduction in {"avg", "premul_sum"}:
        found = [_share(index, rank, world) for index in range(count)]
    else:
        choice = random.Random(repr((reduction, rank)))
        choices = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
        found = [choice.choice(choices) for _ in range(count)]
    if dtype == torch.uint8:
        found = [abs(value) for value in found]
    return torch.tensor(found, dtype=torch.float64).to(dtype)


def _share(index: int, rank: int, world: int) -> float:
    """Multiplied by any factor, no more than one bit is needed above the largest."""
    if index % 2 == 0:
        return (-5.0, 7.0, 11.0)[index % 3] if index % world == rank else 0.0
    return (1.0, -1.0)[rank % 2]


def reduced(reduction: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reduction by its definition in NCCL."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        parts = [torch.view_as_real(tensor) for tensor in tensors]
        return torch.view_as_complex(reduced(reduction, parts))
    if dtype == torch.bool:
        stacked = torch.stack(list(tensors))
        return stacked.any(0) if reduction in {"sum", "max"} else stacked.all(0)
    if not dtype.is_floating_point:
        return _of_integers(reduction, [tensor.long() for tensor in tensors]).to(dtype)
    if reduction == "avg":
        tensors = [_scaled(tensor, 1 / len(tensors)) for tensor in tensors]
    elif reduction == "premul_sum":
        tensors = [_scaled(tensor, FACTOR) for tensor in tensors]
    return _folded(reduction, [tensor.double() for tensor in tensors]).to(dtype)


def _of_integers(reduction: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    found = _folded(reduction, tensors)
    if reduction == "avg":
        return torch.div(found, len(tensors), rounding_mode="trunc")
    return found


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Both the factor and the product are rounded to the dtype."""
    rounded = torch.tensor(factor, dtype=torch.float64).to(tensor.dtype).double()
    return (tensor.double() * rounded).to(tensor.dtype)


_FOLDS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _folded(reduction: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    found = tensors[0]
    for tensor in tensors[1:]:
        found = _FOLDS.get(reduction, torch.add)(found, tensor)
    return found


def _tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
