"""The command ``weightsync pool``: who is in a running job."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from weightsync.blocking import Observer
from weightsync.cli import members
from weightsync.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.membership import Membership, MembershipEvent

DESCRIPTION: Final = """\
Shows the members of a running job: trainer ranks and replicas, the version that each
holds, what became of the last push, signs of life, and who joined, left or failed. It
only looks, and never delays the job. docs/operations.md says what it all means."""

SHOWN_EVENTS: Final = 10
CLEAR: Final = "\x1b[H\x1b[2J"
"""Puts the cursor into the upper left corner of a terminal and clears it."""

Look = tuple["Membership", "list[MembershipEvent]"]
"""The members, and the events since the look before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="of the trainers' store, as tcp://host:port; WEIGHTSYNC_STORE by default",
    )
    parser.add_argument(
        "--job", default="default", help="the job, where one has a name"
    )
    parser.add_argument(
        "--watch", action="store_true", help="go on until the job ends, or Ctrl-C"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks with --watch; 1 by default",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for the job, and for each answer; 10 by default",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="for programs: one line for each look, with the events since the last",
    )


def run(found: argparse.Namespace) -> None:
    """Look, once or again and again, and print what is there."""
    with Observer(found.address, job=found.job, timeout=found.timeout) as observer:
        name = f"job {found.job!r} at {observer.address}"
        recent: deque[MembershipEvent] = deque(maxlen=SHOWN_EVENTS)
        for membership, events in _looks(observer, found):
            recent.extend(events)
            if found.json:
                line = {"membership": membership, "events": events}
                print(msgspec.json.encode(line).decode(), flush=True)
            else:
                text = "\n".join(members.lines(membership, recent, name))
                _show(text, again=found.watch)


def _looks(observer: Observer, found: argparse.Namespace) -> Iterator[Look]:
    number = 0
    try:
        while True:
            membership = observer.membership()
            events = list(_events(observer, number, membership.number))
            number = membership.number
            yield membership, events
            if not found.watch:
                return
            time.sleep(found.interval)
    except ClosedError:
        print("The trainers have closed: the job is over.", file=sys.stderr)


def _events(observer: Observer, number: int, last: int) -> Iterator[MembershipEvent]:
    """Events up to the last before a snapshot; these are here already."""
    events = observer.events(after=number)
    while number < last:
        event = next(events)
        number = event.number
        yield event


def _show(text: str, *, again: bool) -> None:
    """Print a look; in a terminal over the one before, else with a line between."""
    live = again and sys.stdout.isatty()
    print(f"{CLEAR}{text}" if live else text, flush=True)
    if again and not live:
        print(flush=True)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
