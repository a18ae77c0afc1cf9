"""Reads the programs out of a page of the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HEADING = re.compile(r"#{1,6} (.+)")
_LINK = re.compile(r"\[[^\]]+\]\(#([^)]+)\)")
_COMMAND = re.compile(
    r"# (?:python|torchrun --standalone --nproc-per-node (\d+)) (trainer|generator)\.py"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: the section that it is in, as links name it; language; text."""

    section: str
    language: str
    text: str


@dataclass(frozen=True)
class Program:
    """A program that the page shows; ``processes`` are torchrun's, None is python."""

    section: str
    role: str
    processes: int | None
    text: str


@dataclass(frozen=True)
class Refusal:
    """A call that the page shows, what must run before it, and the error it shows."""

    setup: str
    call: str
    error: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    section, language, lines = "", None, []
    for line in page.read_text().splitlines():
        if language is None and line.startswith("```"):
            language, lines = line[3:], []
        elif language is not None and line == "```":
            found.append(Block(section, language, "\n".join([*lines, ""])))
            language = None
        elif language is not None:
            lines.append(line)
        elif match := _HEADING.fullmatch(line):
            section = _slug(match[1])
    assert language is None, f"{page}: a block has no end"
    return found


def programs_of(blocks: Sequence[Block]) -> list[Program]:
    """Return the blocks that say in their first line how they are run."""
    found: list[Program] = []
    for block in blocks:
        match = _COMMAND.match(block.text)
        if match is not None:
            count, role = match.groups()
            processes = None if count is None else int(count)
            found.append(Program(block.section, role, processes, block.text))
    return found


def refusals_of(blocks: Sequence[Block], section: str) -> list[Refusal]:
    """Return the calls of a section: a setup, then pairs of call and error."""
    setup, *rest = [block for block in blocks if block.section == section]
    calls, errors = rest[::2], rest[1::2]
    assert {"python"} == {block.language for block in (setup, *calls)}
    assert {"text"} == {block.language for block in errors}
    return [
        Refusal(setup.text, call.text, " ".join(error.text.split()))
        for call, error in zip(calls, errors, strict=True)
    ]


def table_of(page: Path, corner: str) -> list[list[str]]:
    """Return the rows of the table with this first cell; of a link the section."""
    rows: list[list[str]] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and (rows or cells[0] == corner):
            rows.append([_LINK.sub(r"\1", cell) for cell in cells])
        elif rows:
            break
    del rows[1]
    return rows


def sections_of(page: Path) -> list[str]:
    """Return all sections of a page, as links name them."""
    matches = [_HEADING.fullmatch(line) for line in _prose(page)]
    return [_slug(match[1]) for match in matches if match is not None]


def links_of(page: Path) -> set[str]:
    """Return the sections that a page links to."""
    return {section for line in _prose(page) for section in _LINK.findall(line)}


def _prose(page: Path) -> list[str]:
    """The lines of a page that are not in fenced blocks."""
    return "".join(page.read_text().split("```")[::2]).splitlines()


def _slug(heading: str) -> str:
    """A heading as GitHub names it in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
