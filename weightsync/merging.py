"""Whether a partial push can be put into what trainer ranks keep of a full one. Pure.

It must become exactly what the replicas hold. That is sure only where each rank holds
each pushed name as it did before: then every copy of every piece is replaced, whichever
of them is sent later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.spec import Manifest

_Piece = tuple[str, int]
"""A name, and the how manieth piece of it."""


def can_merge(whole: Sequence[Manifest], parts: Sequence[Manifest]) -> bool:
    """Whether the parts, one for each trainer rank, replace pieces of the whole."""
    pushed = frozenset(name for manifest in parts for name in manifest.names)
    pairs = zip(whole, parts, strict=True)
    return all(_is_part(before, part, pushed) for before, part in pairs)


def places_of(whole: Manifest, part: Manifest) -> list[int]:
    """For each piece of a part the index of the piece of the whole that it replaces.

    Raises PlanError where there is none.
    """
    indices = {piece: index for index, piece in enumerate(_pieces(whole))}
    try:
        return [indices[piece] for piece in _pieces(part)]
    except KeyError as error:
        raise PlanError(f"no piece {error.args[0]} is kept") from None


def _is_part(whole: Manifest, part: Manifest, pushed: frozenset[str]) -> bool:
    chosen = [index for index, name in enumerate(whole.names) if name in pushed]
    if len(chosen) != len(part.names):
        return False
    before = _pieces(whole)
    held = {before[index]: whole.kinds[whole.kind_of[index]] for index in chosen}
    now = zip(_pieces(part), part.kind_of, strict=True)
    if any(held.get(piece) != part.kinds[kind] for piece, kind in now):
        return False
    touched = {root for root in _tied(whole) if any(p[0] in pushed for p in root)}
    return touched == set(_tied(part))


def _pieces(manifest: Manifest) -> list[_Piece]:
    seen: dict[str, int] = {}
    pieces: list[_Piece] = []
    for name in manifest.names:
        seen[name] = nth = seen.get(name, -1) + 1
        pieces.append((name, nth))
    return pieces


def _tied(manifest: Manifest) -> Iterable[frozenset[_Piece]]:
    """The pieces that share memory with others, together."""
    if not manifest.ties:
        return []
    together: dict[int, set[_Piece]] = {}
    for root, piece in zip(manifest.roots, _pieces(manifest), strict=True):
        together.setdefault(root, set()).add(piece)
    return [frozenset(pieces) for pieces in together.values() if len(pieces) > 1]
