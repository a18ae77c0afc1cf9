"""Patterns of names: match a name, and fill what it bound into another pattern.

``{layer}`` stands for one part of a path, without dots; ``{*path}`` for one or more
characters, dots included, as many as it can; everything else for itself.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{(\*?[A-Za-z_][A-Za-z0-9_]*)\}")


class _Parsed(NamedTuple):
    pieces: tuple[str, ...]  # literals at even, placeholders at odd places
    placeholders: frozenset[str]


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> _Parsed:
    pieces = _PLACEHOLDER.split(pattern)
    if any("{" in literal or "}" in literal for literal in pieces[::2]):
        raise PlanError(
            f"pattern {pattern!r}: braces hold a name, as in {{layer}} or {{*path}}"
        )
    pieces[1::2] = [piece.removeprefix("*") for piece in pieces[1::2]]
    return _Parsed(tuple(pieces), frozenset(pieces[1::2]))


def placeholders(pattern: str) -> frozenset[str]:
    """Return the names in braces. Raises PlanError for braces that hold none."""
    return _parse(pattern).placeholders


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    parsed = _parse(pattern)
    if len(parsed.placeholders) < len(parsed.pieces) // 2:
        raise PlanError(f"pattern {pattern!r}: each placeholder may occur once")
    regex = ""
    for index, piece in enumerate(_PLACEHOLDER.split(pattern)):
        if index % 2 == 0:
            regex += re.escape(piece)
        elif piece.startswith("*"):
            regex += f"(?P<{piece[1:]}>.+)"
        else:
            regex += f"(?P<{piece}>[^.]+)"
    return re.compile(regex, re.DOTALL)


class Matcher:
    """A pattern made ready to be tried on many names.

    Raises PlanError for a placeholder that occurs twice.
    """

    __slots__ = ("_regex", "_suffix")

    def __init__(self, pattern: str) -> None:
        self._regex = _regex(pattern)
        self._suffix = _parse(pattern).pieces[-1]

    def match(self, name: str) -> dict[str, str] | None:
        """Return what each placeholder stands for in this name, or None."""
        # Most patterns differ at their end, and this costs a fifth of a match.
        if not name.endswith(self._suffix):
            return None
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()


def fill(pattern: str, bound: Mapping[str, str]) -> str:
    """Put what was bound in the places of the pattern's placeholders.

    Raises KeyError for one that is not bound.
    """
    pieces = _parse(pattern).pieces
    if len(pieces) == 1:
        return pattern
    return "".join(
        [bound[piece] if at % 2 else piece for at, piece in enumerate(pieces)]
    )
