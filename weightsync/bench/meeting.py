"""The ranks of one process group: started with their engine, they meet at a file."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from weightsync.bench.places import variables
from weightsync.bench.runner import Processes

if TYPE_CHECKING:
    from collections.abc import Generator

    from weightsync.announcing import EngineName


@contextmanager
def meeting(engine: EngineName, ranks: int) -> Generator[tuple[Processes, str]]:
    """Yield what starts so many ranks, and the path of the file at which they meet.

    Raises UnsupportedError where the engine cannot be used.
    """
    with (
        TemporaryDirectory(prefix="weightsync-bench-") as folder,
        Processes(variables(engine, ranks)) as started,
    ):
        yield started, str(Path(folder) / "store")
