"""Runs the command line as ``python -m weightsync.cli``."""

from __future__ import annotations

import sys

from weightsync.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
