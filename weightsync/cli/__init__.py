"""The command line ``weightsync``."""

from __future__ import annotations

from weightsync.cli.main import main

__all__ = ["main"]
