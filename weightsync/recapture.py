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

    def again(
        self, state_dict: Mapping[str, object], ignore: Sequence[str]
    ) -> Captured | None:
        """Capture at once, without a copy; None where the layout is another one."""
        key = self._describe(state_dict, ignore)
        if self._manifest is None or key is None or key != self._key:
            return None
        return Captured(self._manifest, _values(state_dict))

    def __call__(
        self, state_dict: Mapping[str, object], ignore: Sequence[str]
    ) -> Captured:
        """Capture anew; raises what ``layout.capture`` raises."""
        captured = capture(state_dict, ignore=ignore)
        key = self._describe(state_dict, ignore)
        # Where capture had to copy, or tied entries, it has to do so again.
        same = key is not None and all(
            mine.data_ptr() == theirs.data_ptr()
            for mine, theirs in zip(captured.tensors, _values(state_dict), strict=True)
        )
        self._key, self._manifest = (key, captured.manifest) if same else (None, None)
        return captured

    def _describe(
        self, state_dict: Mapping[str, object], ignore: Sequence[str]
    ) -> tuple[object, ...] | None:
        """All that the manifest depends on; None for what only capture understands."""
        if ignore or not isinstance(state_dict, Mapping):
            return None
        if not set(map(type, state_dict.values())) <= _PLAIN:
            return None
        try:
            return tuple(state_dict), describe(_values(state_dict))
        except RuntimeError:  # No sizes or strides: capture says whose.
            return None


def _values(state_dict: Mapping[str, object]) -> tuple[torch.Tensor, ...]:
    return cast("tuple[torch.Tensor, ...]", tuple(state_dict.values()))
