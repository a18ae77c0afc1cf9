"""The programs of docs/backend.md do what they say, on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs.programs import blocks_of
from weightsync import testing

pytestmark = testing.requires_emulator()

PAGE: Final = Path(__file__).parents[2] / "docs" / "backend.md"
BLOCKS: Final = [block for block in blocks_of(PAGE) if block.language == "python"]


def run(texts: list[str]) -> None:
    import torch.distributed as dist

    names: dict[str, Any] = {}
    for text in texts:
        exec(text, names)
    dist.destroy_process_group()


@pytest.mark.parametrize("section", dict.fromkeys(block.section for block in BLOCKS))
def test_a_program_does_what_it_says(section: str) -> None:
    texts = [block.text for block in BLOCKS if block.section == section]
    if "init_process_group" not in texts[0]:
        texts.insert(0, BLOCKS[0].text)

    assert [None, None] == testing.emulated(run, 2, args=[texts])
