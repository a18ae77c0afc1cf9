"""Sizes, durations and rates as text, and back."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Read ``64``, ``64KiB``, ``64k`` or ``1.5GiB``; always powers of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size, such as 8, 64KiB or 1GiB")
    nbytes = int(float(match[1]) * 1024 ** _POWER[match[2].lower()])
    if nbytes < 1:
        raise ArgumentTypeError(f"{text!r} is less than one byte")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes that are separated by commas."""
    return tuple(parse_size(part) for part in text.split(","))


def parse_count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def parse_counts(text: str) -> tuple[int, ...]:
    """Read whole numbers that are separated by commas."""
    return tuple(parse_count(part) for part in text.split(","))


def format_size(nbytes: int) -> str:
    """Write a number of bytes: ``64 KiB``, ``1.5 GiB``, ``-3 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits: ``12.3 us``, ``105 ms``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_rate(rate: float) -> str:
    """Write bytes per second in powers of 1000: ``9.87 GB/s``."""
    for limit, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if rate >= limit:
            return f"{rate / limit:.3g} {unit}"
    return f"{rate / 1e3:.3g} kB/s"
