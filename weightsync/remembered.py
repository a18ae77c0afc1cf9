"""What both ends of a channel remember alike: the values that were used last."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

REMEMBERED: Final = 16
"""So many layouts are remembered by both ends of a channel."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Remembered(OrderedDict[KeyT, ValueT], Generic[KeyT, ValueT]):
    """The values used last. Two ends that use the same keys in the same order agree.

    So a sender knows what its peer still has, and sends nothing twice.
    """

    def use(self, key: KeyT) -> bool:
        """Whether it is remembered; then it becomes the one used last."""
        if key not in self:
            return False
        self.move_to_end(key)
        return True

    def put(self, key: KeyT, value: ValueT) -> None:
        """Remember a value as the one used last; forget the oldest."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > REMEMBERED:
            self.popitem(last=False)
