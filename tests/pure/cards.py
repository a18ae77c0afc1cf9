"""A message that tests put into stores."""

from __future__ import annotations

import msgspec


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    rank: int


CARD = Card(name="gen-0", rank=3)
