"""Memory that a rank registers with NCCL for segments that it has not itself.

All ranks register each window of NCCL together, and each brings memory of its own that
begins an allocation. Here it is the same memory for all of them, mapped at one more
address for each: so none is registered twice, and it is there once. Nobody puts into
it, and nothing in it is ever put.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from weightsync.backend import map_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Filler:
    """One allocation of NCCL. Links may share it; any thread may call it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory: Final = memory
        self._lock: Final = threading.Lock()
        self._tensors = [memory]

    def tensors(self, count: int) -> Sequence[Tensor]:
        """Return it at so many addresses, always the same ones."""
        with self._lock:
            while len(self._tensors) < count:
                self._tensors.append(map_again(self.memory))
            return self._tensors[:count]
