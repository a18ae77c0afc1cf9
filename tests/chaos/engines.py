"""What the chaos suite runs on."""

from __future__ import annotations

from tests.processes.engines import ENGINES, Engine

__all__ = ["ENGINES", "Engine"]
