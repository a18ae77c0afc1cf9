"""What docs/operations.md says that a program says is what the program can say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import pytest

from weightsync.membership import Kind, Role, State

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "operations.md").read_text()

MESSAGES: Final = (
    "Reasons and errors",
    "Other reasons of a failure",
    "What a call of a trainer says",
    "What a call of a generator says",
    "What a start says",
)
SHORTEST: Final = 8
"""So many characters of a message say which one it is."""


def _rows(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    text = re.split(rf"^#+ {re.escape(section)}$", PAGE, flags=re.MULTILINE)[1]
    lines = text.strip().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|"))
    end = next(
        (at for at, line in enumerate(lines[start:], start) if line[:1] != "|"),
        len(lines),
    )
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines[start + 2 : end]
    ]


def _pattern(text: str) -> str:
    """A message, with a star for each name, number, and part that is left out."""
    found = re.sub(r"'[^']*'|\d+(\.\d+)?|\.\.\.", "*", text)
    return " ".join(found.split()).strip("* ")


def _said(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join([_said(part) for part in parts])
        case _:
            return "*"


def _messages() -> Iterator[str]:
    """All strings of the package, with a star for what is filled in."""
    for path in (ROOT / "weightsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                yield _pattern(_said(node))


@pytest.fixture(scope="module")
def messages() -> set[str]:
    return set(_messages())


def _is_one_of(quoted: str, messages: set[str]) -> bool:
    """Whether a message has what is quoted, or what is quoted has a whole message."""
    pattern = _pattern(quoted)
    return any(
        pattern in message
        or (len(message.replace("*", "")) >= SHORTEST and message in pattern)
        for message in messages
    )


@pytest.mark.parametrize("section", MESSAGES)
def test_every_message_that_is_explained_can_be_said(
    section: str, messages: set[str]
) -> None:
    quoted = [said for row in _rows(section) for said in re.findall("`(.+?)`", row[0])]
    unknown = [said for said in quoted if not _is_one_of(said, messages)]

    assert quoted
    assert [] == unknown


def test_every_event_and_every_state_is_explained() -> None:
    events = {row[0].split(":")[0] for row in _rows("Events")}
    states = {row[0].strip("`") for row in _rows("States")}

    assert set(get_args(State)) | {"awaited", "leader"} == states
    assert set(get_args(Kind)) == {event.split()[-1] for event in events}
    roles = {"replica": "replica", "trainer": "trainer rank"}
    assert {roles[role] for role in get_args(Role)} == {
        " ".join(event.split()[:-1]) for event in events
    }
