"""Captures a state dict again in a fraction of the time, if its layout is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weightsync.backend import describe
from weightsync.fsdp import Copies
from weightsync.layout import Captured, captured, kept
from weightsync.locate import dtensor_type, located, spec_of
from weightsync.pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightsync.names import Rule
    from weightsync.pieces import Piece
    from weightsync.spec import Manifest

_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}


class Recapture:
    """``capture`` with the manifest of the time before, where that is still true.

    Whether it is true is decided by everything a manifest depends on: names, rules, the
    placements of DTensors, and of each local tensor dtype, device, sizes, strides and
    what it shares memory with. ``check`` raises for pieces that may not be captured.
    """

    def __init__(self, check: Callable[[Sequence[Piece]], None] | None = None) -> None:
        self._known: _Known | None = None
        self._check: Final = check

    def again(
        self,
        state_dict: Mapping[str, object],
        ignore: Sequence[str],
        names: Sequence[Rule] = (),
    ) -> Captured | None:
        """Capture at once, without a copy; None where the layout is another one."""
        known = self._known
        if known is None or known.call != _call(state_dict, ignore, names):
            return None
        values = list(state_dict.values())
        seen = _see([values[index] for index in known.kept])
        if seen is None or seen.description != known.description:
            return None
        tensors = [view.of(seen.tensors) for view in known.views]
        return Captured(known.manifest, tuple(tensors))

    def __call__(
        self,
        state_dict: Mapping[str, object],
        ignore: Sequence[str],
        names: Sequence[Rule] = (),
    ) -> Captured:
        """Capture anew; raises what ``layout.capture`` raises."""
        self._known = None
        chosen = kept(state_dict, ignore)
        pieces = pieces_of(located(chosen), names)
        if self._check is not None:
            self._check(pieces)
        result = captured(pieces)
        # Where capture had to copy it has to do so again.
        copied = any(
            piece.tensor.data_ptr() != tensor.data_ptr()
            for piece, tensor in zip(pieces, result.tensors, strict=True)
        )
        seen = None if copied else _see(list(chosen.values()))
        if seen is not None:
            self._known = _Known(
                _call(state_dict, ignore, names),
                [index for index, name in enumerate(state_dict) if name in chosen],
                seen.description,
                result.manifest,
                [_View.of_piece(piece, seen.tensors) for piece in pieces],
            )
        return result


class _Seen(NamedTuple):
    """Local tensors, and all that their layout depends on."""

    description: tuple[object, ...]
    tensors: list[torch.Tensor]


class _View(NamedTuple):
    """A piece as a view of a local tensor; ``geometry`` is None where it is all of it.

    Otherwise it is sizes, strides, and elements from the start of the local tensor.
    """

    entry: int
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None

    @classmethod
    def of_piece(cls, piece: Piece, tensors: Sequence[torch.Tensor]) -> _View:
        whole, part = tensors[piece.entry], piece.tensor
        if (part.shape, part.stride()) == (whole.shape, whole.stride()):
            return cls(piece.entry, None)
        skipped = int(part.storage_offset()) - int(whole.storage_offset())
        return cls(piece.entry, (tuple(part.shape), part.stride(), skipped))

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self.entry]
        if self.geometry is None:
            return tensor
        sizes, steps, skipped = self.geometry
        start = int(tensor.storage_offset()) + skipped
        return tensor.detach().as_strided(sizes, steps, start)


class _Known(NamedTuple):
    """A call: which of its entries count, what they were, and what became of them."""

    call: tuple[object, ...]
    kept: list[int]
    description: tuple[object, ...]
    manifest: Manifest
    views: list[_View]


def _call(
    state_dict: Mapping[str, object], ignore: Sequence[str], names: Sequence[Rule]
) -> tuple[object, ...]:
    return tuple(state_dict), _frozen(ignore), _frozen(names)


def _frozen(given: object) -> object:
    """A list may change until it is compared; capture refuses what is none."""
    return tuple(given) if isinstance(given, list) else given


def _see(values: Sequence[Any]) -> _Seen | None:
    """Return None for what only ``capture`` understands."""
    kinds, distributed = set(map(type, values)), dtensor_type()
    if not kinds <= {*_PLAIN, distributed} or Copies():
        return None
    specs: dict[int, object] = {}
    tensors: list[torch.Tensor] = list(values)
    if distributed in kinds:
        with torch.no_grad():
            for index, value in enumerate(values):
                if type(value) is distributed:
                    tensors[index] = value.to_local()
                    specs[index] = spec_of(value)
    try:
        return _Seen((specs, describe(tensors)), tensors)
    except RuntimeError:  # No sizes or strides: capture says whose.
        return None
