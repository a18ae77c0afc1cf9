"""Which replicas may be in the pool: all that come, or those proposed. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from weightsync.elastic import NAME_LIMIT
from weightsync.errors import PlanError
from weightsync.membership import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.elastic import Admit


class Admittance:
    """The decision in force. Only ``propose`` changes it."""

    def __init__(self, admit: Admit = "all") -> None:
        self.number = 0
        self._names = None if admit == "all" else frozenset[str]()
        self._given: tuple[str, ...] = ()

    def propose(self, names: tuple[str, ...] | None) -> int:
        """Let these names be the pool, or everybody; return the proposal's number.

        It is in force until the next one. Raises PlanError as ``check_names`` does, and
        nothing has changed then.
        """
        if names is not None:
            names = check_names(names)
        self._names = None if names is None else frozenset(names)
        self._given = names or ()
        self.number += 1
        return self.number

    def admits(self, name: str) -> bool:
        """Whether a replica of this name may be in the pool now."""
        return self._names is None or name in self._names

    @property
    def in_force(self) -> Proposal | None:
        """The proposal in force; None where everybody is admitted.

        It has the number 0 where only proposed replicas are, and none was proposed yet.
        """
        return None if self._names is None else Proposal(self.number, self._given)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of replicas; PlanError unless they are, each once."""
    if isinstance(names, str):
        raise PlanError(f"propose takes several names, not the str {names!r}")
    given: tuple[Any, ...] = tuple(names)
    for name in given:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
            message = (
                f"a replica's name is a str of 1 to {NAME_LIMIT} characters, not "
                f"{name!r:.300}"
            )
            raise PlanError(message)
    twice = [name for name, count in Counter(given).items() if count > 1]
    if twice:
        raise PlanError(f"proposed twice: {', '.join(map(repr, twice[:20]))}")
    return given
