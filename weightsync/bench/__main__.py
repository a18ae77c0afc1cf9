"""Starts the benchmark from the command line."""

from __future__ import annotations

import sys

from weightsync.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
