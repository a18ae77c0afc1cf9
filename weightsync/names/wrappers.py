"""Names as torch gives them: wrapper prefixes removed, patterns of names to ignore."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from weightsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


def canonical(name: str) -> str:
    """Return the name without the parts that torch's wrappers add to its path.

    ``_orig_mod.``, ``_fsdp_wrapped_module.`` and ``_checkpoint_wrapped_module.`` go
    wherever they are whole parts of the path; nothing else does.
    """
    if "_orig_mod." in name or "_wrapped_module." in name:
        return _WRAPPERS.sub("", name)
    return name


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its canonical one, in order.

    Raises PlanError naming both where two names become one.
    """
    originals: dict[str, str] = {}
    for name in names:
        short = canonical(name)
        other = originals.setdefault(short, name)
        if other != name:
            raise PlanError(f"{other!r} and {name!r} both become {short!r}")
    return {name: short for short, name in originals.items()}


def ignored(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a name matches a pattern, as of fnmatch and minding case."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
