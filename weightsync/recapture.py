"""Captures a state dict again in a fraction of the time, if its layout is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

import torch

from weightsync.backend import describe
from weightsync.layout import Captured, capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.spec import Manifest

_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}


class Recapture:
    """``capture`` with the manifest of the time before, where that is still true.

    Whether it is true is decided by everything a manifest depends on: the names, and of
    each tensor dtype, device, sizes, strides and what it shares memory with.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._manifest: Manifest | None = None

    def __call__(
        self, state_dict: Mapping[str, object], ignore: Sequence[str]
    ) -> Captured:
        """Capture; raises what ``layout.capture`` raises."""
        if ignore or not isinstance(state_dict, Mapping):
            return capture(state_dict, ignore=ignore)
        values = list(state_dict.values())
        if not set(map(type, values)) <= _PLAIN:
            return capture(state_dict, ignore=ignore)
        tensors = cast("list[torch.Tensor]", values)
        try:
            key = (tuple(state_dict), describe(tensors))
        except RuntimeError:  # No sizes or strides: capture says whose.
            return capture(state_dict, ignore=ignore)
        if self._manifest is not None and key == self._key:
            return Captured(self._manifest, tuple(tensors))
        captured = capture(state_dict, ignore=ignore)
        # Where capture had to copy, or tied entries, it has to do so again.
        same = all(
            mine.data_ptr() == theirs.data_ptr()
            for mine, theirs in zip(captured.tensors, tensors, strict=True)
        )
        self._key, self._manifest = (key, captured.manifest) if same else (None, None)
        return captured
