"""Memory of the caller that NCCL knows: puts come straight from it, without a copy.

It is made with ``nccl_memory`` and told to a Trainer, each of whose links registers it:
all ranks of a link register together and only when it is formed, whole allocations.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weightsync.announcing import MAX_SOURCES
from weightsync.backend import find_nccl, nccl_allocation, nccl_allocator
from weightsync.errors import PlanError, UnsupportedError
from weightsync.locate import located, named

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from weightsync.locate import Entry, StateDict
    from weightsync.pieces import Piece


@contextmanager
def nccl_memory(
    device: torch.device | int | None = None,
) -> Generator[torch.cuda.MemPool]:
    """Let this thread allocate tensors in memory that NCCL can put from.

    On the GPU that is current, or on ``device``, until the context ends. It is a memory
    pool of torch, which is returned and need not be kept. Raises UnsupportedError where
    there is no GPU or no NCCL.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("memory of NCCL needs a GPU, and there is none")
    find_nccl()
    with torch.cuda.device(device):  # the pool is of the one that is current
        pool = torch.cuda.MemPool(nccl_allocator())
    with torch.cuda.use_mem_pool(pool, device):
        yield pool


class _Allocation(NamedTuple):
    """Where it begins and ends; one byte of it, which keeps it."""

    start: int
    end: int
    byte: Tensor

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Straight:
    """Allocations of NCCL that hold the caller's tensors; they are kept with it.

    Raises PlanError for a tensor on a GPU that is in none.
    """

    def __init__(self, memory: StateDict) -> None:
        found: dict[int, _Allocation] = {}
        for entry in located(named(memory)):
            if entry.tensor.is_cuda and entry.tensor.numel():
                start, nbytes = _place_of(entry)
                if start not in found:
                    byte = _byte_of(entry.tensor)
                    found[start] = _Allocation(start, start + nbytes, byte)
        if len(found) > MAX_SOURCES:
            message = f"{len(found)} allocations of NCCL; {MAX_SOURCES} are the most"
            raise PlanError(f"memory: its tensors are in {message}")
        self._allocations: Final = [found[start] for start in sorted(found)]
        self._starts: Final = [each.start for each in self._allocations]

    @property
    def windows(self) -> Sequence[Tensor]:
        """A byte of each allocation, the largest first.

        Ranks register the n-th of each together, and NCCL takes the addresses of the
        largest for it: so ranks that have about the same waste few.
        """
        ordered = sorted(self._allocations, key=lambda each: -each.nbytes)
        return [each.byte for each in ordered]

    def check(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raise PlanError for a tensor that does not lie in them wholly."""
        for tensor, name in zip(tensors, names, strict=True):
            if tensor.numel() and not self._has(tensor):
                message = (
                    f"{name!r}: staging='none' puts straight out of the memory that "
                    f"the Trainer was given, and these {tensor.nbytes} bytes are in "
                    f"other memory of {tensor.device}"
                )
                raise PlanError(message)

    @staticmethod
    def check_pieces(pieces: Sequence[Piece]) -> None:
        """Raise PlanError for a piece that would be copied to be captured."""
        for piece in pieces:
            tensor = piece.tensor
            lazy = tensor.is_conj() or tensor.is_neg()
            if tensor.is_cuda and (lazy or not tensor.is_contiguous()):
                found = f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
                message = (
                    f"{piece.label}: staging='none' puts straight out of its memory, "
                    f"so it has to be contiguous; found "
                    f"{'a lazily conjugated or negated view' if lazy else found}"
                )
                raise PlanError(message)

    def _has(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and start + tensor.nbytes <= self._allocations[index].end


def straight_from(staging: str, memory: StateDict | None) -> Straight | None:
    """Return what puts come straight from; None where they are staged.

    Raises PlanError for other options, and for memory that NCCL does not know.
    """
    if staging not in {"copy", "none"}:
        raise PlanError(f"staging is 'copy' or 'none', not {staging!r}")
    if (staging == "none") != (memory is not None):
        message = "memory= is what staging='none' puts from: give both, or neither"
        raise PlanError(message)
    return None if memory is None else Straight(memory)


def _place_of(entry: Entry) -> tuple[int, int]:
    """Return address and bytes of the allocation that it begins in."""
    found = nccl_allocation(entry.tensor)
    if found is None:
        message = (
            f"memory: {entry.name!r} is in other memory of {entry.tensor.device}: "
            f"allocate it in `with weightsync.nccl_memory():`"
        )
        raise PlanError(message)
    return found


def _byte_of(tensor: Tensor) -> Tensor:
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(tensor.untyped_storage(), 0, (1,), (1,))
